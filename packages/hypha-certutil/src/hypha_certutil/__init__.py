"""Offline certificate authority for Hypha networks.

`authority` creates certificates, requests and revocation lists as values; `storage` keeps them in a folder with the
right permissions; `cli` is the command `hypha-certutil`. No code here uses a network or imports another Hypha package.
"""
