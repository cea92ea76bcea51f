"""Machines to test on, made and not mocked: `with Rig([user_data, user_data]) as rig:`."""
