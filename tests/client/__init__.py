"""Tests of the client's commands as users run them: real processes against a played cluster or HTTP server: a minute."""
