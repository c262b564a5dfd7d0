"""Tests mirror the folders of the packages they test."""
