"""Tests of plain objects, one module each, without model and without processes of ours: seconds."""
