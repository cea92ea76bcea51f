"""Tests of the docs pages and of the site that is made from them."""
