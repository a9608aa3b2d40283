"""Links: how requests, replies and events travel between replicas."""
