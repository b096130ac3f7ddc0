//! Ways in to pods of tenants by UDP and SCTP. The pods' answers go to an address of the node that only conntrack knows.

mod answers;
mod world;
