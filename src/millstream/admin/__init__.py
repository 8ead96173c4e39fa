"""Inspection of streams, groups and handlers for operators, and the ACL rights of each role."""
