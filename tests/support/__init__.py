"""What tests of several folders share: helpers, never tests."""
