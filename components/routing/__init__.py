"""Choosing workers: what is known of them, the policies, and the labels of live requests."""
