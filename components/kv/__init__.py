"""KV blocks: their layout, their hashes, and who holds them."""
