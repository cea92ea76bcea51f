"""Tests of payload.finetune."""
