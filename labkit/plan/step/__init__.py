"""A step of a job, in bytes and seconds: each a sum over what its laws say."""
