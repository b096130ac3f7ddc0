//! Which view a source address has: that of the VPC whose endpoint on this node has the address.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use thuban_api::identifiers::Vni;
use thuban_common::tables::HOST_SOURCE;
use thuban_rows::Visible;
use tracing::{info, warn};

use crate::dataplane::tables::TableKey;
use crate::dns::{Asker, DNS_PORT, Domain, Server, Settings, View, Views};
use crate::node::Node;

/// The port may be somebody else's.
const BIND_RETRY: Duration = Duration::from_secs(5);

/// A view, and what it was made of.
type Made = (Arc<Visible>, Arc<View>);

/// Of a node's attachments. Views are made once for each change of what a VPC sees.
struct NodeViews {
    node: Arc<Node>,
    domain: Domain,
    made: Mutex<HashMap<u32, Made>>,
}

impl Views for NodeViews {
    fn of(&self, source: IpAddr) -> Option<Asker> {
        let (vpc, visible) = {
            let state = self.node.state();
            let vpc = state.attachments.values().find_map(|attachment| {
                // One that is fenced may have an address that another one has by now.
                let key = TableKey::Attachment(attachment.host_ifindex);
                let has_it = attachment.addresses().any(|address| address == source);
                (has_it && state.tables.get(&key).is_some()).then_some(attachment.vni)
            })?;
            (vpc, Arc::clone(state.program.visible(Vni::new(vpc)?)?))
        };
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        match made.get(&vpc) {
            Some((of, view)) if Arc::ptr_eq(of, &visible) => Some(Asker {
                vpc,
                view: Arc::clone(view),
            }),
            _ => {
                let view = Arc::new(View::new(self.domain.clone(), (*visible).clone()));
                made.retain(|_, (of, _)| Arc::strong_count(of) > 1);
                made.insert(vpc, (visible, Arc::clone(&view)));
                Some(Asker { vpc, view })
            }
        }
    }
}

/// Answers pods' queries for the cluster's DNS, if the installation names it. Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let settings = &node.settings;
    let Some(cluster_dns) = settings.cluster_dns else {
        info!("THUBAN_CLUSTER_DNS is not set: only the VPC that nodes are in has the cluster's DNS");
        return;
    };
    let address = SocketAddr::from((HOST_SOURCE, DNS_PORT));
    loop {
        let views = NodeViews {
            node: Arc::clone(&node),
            domain: settings.cluster_domain.clone(),
            made: Mutex::default(),
        };
        match Server::bind(Settings::new(address, (cluster_dns, 53).into()), views).await {
            Ok(server) => {
                info!(%cluster_dns, "answers queries of VPCs that share the cluster's DNS");
                return server.serve(std::future::pending()).await;
            }
            Err(error) => warn!(
                error = &error as &dyn std::error::Error,
                "pods of other VPCs than the nodes' have no DNS, it is tried again"
            ),
        }
        tokio::time::sleep(BIND_RETRY).await;
    }
}
