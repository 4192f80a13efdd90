"""Tests that start the processes on localhost, whole clusters or one beside a test that plays the others."""
