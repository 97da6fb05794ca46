"""Secure aggregation: the sum of vectors of integers modulo 2^m over the clients that arrive, and nothing else of them.

Double masking after Bonawitz et al. 2017, on a sparse graph after Bell et al. 2020 beyond 50 clients. Nothing here
knows a network, a model or what is summed; everything takes and gives bytes, numbers and NumPy arrays.

primitives     X25519, Ed25519, HKDF-SHA256, ChaCha20-Poly1305: the only calls of a cipher
long_term      the keys of a node, and the roster of everybody's that each node holds itself
sum_terms      what all parties of one sum agree on
mask_graph     who masks towards whom, and holds whose shares
shamir         secrets in shares, and back
derived_keys   every key and statement of a sum, bound to its run, round, attempt and clients
masks          key streams added to vectors
bit_packing    vectors of m-bit integers as bytes
sum_messages   the messages as bytes and back
node_rules     what a node insists on, and what it has bound itself to
sum_client     a client's side: prepare, upload, unmask
sum_server     the server's side
lying_server   whose sum a lying server can get at worst
"""
