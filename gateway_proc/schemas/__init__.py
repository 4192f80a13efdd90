"""What the HTTP API takes, as pydantic models. The ranges of sampling fields are those of SamplingParams."""
