"""KV blocks on the move: layouts, plans, agents, leases."""
