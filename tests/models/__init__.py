"""Tests of the models' sizes and costs."""
