"""The further ranks of a tensor-parallel replica: processes that do as rank 0 says."""
