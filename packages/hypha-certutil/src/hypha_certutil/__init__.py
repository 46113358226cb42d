"""Offline certificate authority for Hypha networks.

`authority` makes certificates, requests and revocation lists, as values; `files` keeps them in a folder with the right
permissions; `cli` is the command `hypha-certutil`. Nothing here talks to a network or imports another Hypha package.
"""
