"""Real machines for tests: `with Rig([user_data, user_data]) as rig:`."""
