"""Tests of the client's commands as users run them: real processes against a played cluster or server: a minute."""
