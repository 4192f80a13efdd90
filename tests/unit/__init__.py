"""Tests of plain objects, one module each, without a model, few with processes: seconds."""
