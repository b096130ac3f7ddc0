//! Tests that take nodes away, together with the pods of all tenants on them.

mod node_deleted;
