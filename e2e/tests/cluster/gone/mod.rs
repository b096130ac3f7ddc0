//! Tests that take nodes away, and the pods of all tenants with them.

mod node_deleted;
