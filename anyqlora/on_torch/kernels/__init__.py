"""Fast paths: each stands beside a slow, obvious definition of the same thing, which the tests compare it with."""
