"""Tests of the operator's side of the cloud, against a stand-in of its REST interfaces."""
