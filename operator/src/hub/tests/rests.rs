//! NodePorts that pass from one VPC to another.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use thuban_rows::builders::network_id;
use thuban_rows::{Backend, ExposedPort, Port};

use super::*;
use crate::model::world::{NodePort, Service};

const PORT: NodePort = (6, 30080);
/// As the hub has it by default.
const LONGEST: Duration = Duration::from_mins(11);

fn service_name(name: &str) -> EndpointName {
    ("ns".to_owned(), name.to_owned())
}

/// A service with a backend on each droplet.
pub(super) fn service(network: &str, last: u8, recorded: Option<BTreeSet<NodePort>>) -> Service {
    let address = Ipv4Addr::new(10, 96, 0, last).into();
    let backends: BTreeSet<Backend> = (1..=3)
        .map(|number| Backend {
            address: Ipv4Addr::new(10, last, 0, number).into(),
            port: 8080,
        })
        .collect();
    let homes = backends.iter().map(|backend| backend.address);
    let homes = homes.zip(["a", "b", "c"].map(str::to_owned)).collect();
    let port = ExposedPort {
        protocol: PORT.0,
        port: 80,
        node_port: Some(PORT.1),
        local: Some(backends.clone()),
        ending: BTreeSet::new(),
        peers: BTreeSet::new(),
        affinity: 0,
        members: BTreeSet::new(),
    };
    let table = Port {
        protocol: PORT.0,
        port: 80,
        backends,
        affinity: 0,
        local: false,
    };
    Service {
        network: network.into(),
        name: network.into(),
        by_node: false,
        by_peers: true,
        born: (None, network.into()),
        tables: vec![(address, vec![table])],
        own_addresses: Vec::new(),
        exposed: vec![(address, vec![port])],
        outside: Vec::new(),
        fronts: Vec::new(),
        tunnel: false,
        clients: None,
        check: None,
        homes,
        hints: BTreeMap::new(),
        health_port: None,
        recorded,
    }
}

fn set(hub: &Hub, network: &str, service: Option<Service>) {
    hub.update(|world| world.set_service(&service_name(network), service));
}

fn resting(hub: &Hub, network: &str) -> bool {
    !hub.resting_node_ports(&service_name(network)).is_empty()
}

/// Another VPC, `blue`, with the network `shop` beside `red` with `web`.
fn two_vpcs() -> Hub {
    let (hub, _) = hub();
    hub.update(|world| {
        let cidrs = vec!["10.0.0.0/16".to_owned()];
        world.set_vpc("blue", Some(vpc(Vni::new(8).unwrap())));
        let network = world::Network {
            vpc: "blue".into(),
            id: network_id(2),
            cidrs,
            private: false,
            limits: Limits::default(),
        };
        world.set_network("shop", Some(network));
    });
    hub
}

/// The droplet's node ports by what it was sent, and the last sequence.
struct Droplet {
    id: u64,
    receiver: UnboundedReceiver<Outgoing>,
    sequence: u64,
    ports: BTreeMap<(u32, Vec<u8>), u32>,
}

impl Droplet {
    fn open(hub: &Hub, name: &str) -> Self {
        let (id, receiver) = hub.open(name, &[], &[], Kinds::all());
        let mut droplet = Self {
            id,
            receiver,
            sequence: 0,
            ports: BTreeMap::new(),
        };
        droplet.read();
        droplet
    }

    fn read(&mut self) {
        while let Ok(message) = self.receiver.try_recv() {
            let Some(operator_message::Message::Program(program)) = message.unpack().message else {
                continue;
            };
            self.sequence = program.sequence;
            for row in program.upserts {
                if let Some(row::Row::Exposed(row)) = row.row {
                    self.ports.insert((row.vni, row.address), row.ports[0].node_port);
                }
            }
            for key in program.deletes {
                if let Some(thuban_proto::transit::row_key::Key::Exposed(key)) = key.key {
                    self.ports.remove(&(key.vni, key.address));
                }
            }
        }
    }

    /// VNIs whose service it has the port for.
    fn has(&mut self) -> Vec<u32> {
        self.read();
        let given = self.ports.iter().filter(|(_, port)| **port == u32::from(PORT.1));
        given.map(|((vni, _), _)| *vni).collect()
    }

    fn ack(&mut self, hub: &Hub, name: &str) {
        self.read();
        assert!(hub.ack(name, self.id, self.sequence));
    }
}

#[tokio::test(start_paused = true)]
async fn a_port_passes_on_when_all_droplets_know_it_is_free() {
    let hub = two_vpcs();
    let mut droplets = ["a", "b", "c"].map(|name| (name, Droplet::open(&hub, name)));
    set(&hub, "web", Some(service("web", 1, None)));
    for (name, droplet) in &mut droplets {
        assert_eq!(droplet.has(), [VNI.get()]);
        droplet.ack(&hub, name);
    }
    // Its Service goes, another has the port; in one moment, whatever order.
    hub.update(|world| {
        world.set_service(&service_name("shop"), Some(service("shop", 2, None)));
        world.set_service(&service_name("web"), None);
    });
    let [first, others @ ..] = &mut droplets;
    for (name, droplet) in others {
        assert_eq!(droplet.has(), [] as [u32; 0]);
        droplet.ack(&hub, name);
    }
    assert!(resting(&hub, "shop"), "one has not acked");
    assert_eq!(first.1.has(), [] as [u32; 0]);
    // A new stream without an ack says nothing.
    first.1 = Droplet::open(&hub, "a");
    assert!(resting(&hub, "shop"));
    first.1.ack(&hub, "a");
    assert!(!resting(&hub, "shop"));
    for (_, droplet) in &mut droplets {
        assert_eq!(droplet.has(), [8]);
    }
    // Within its VPC it passes at once.
    hub.update(|world| {
        world.set_service(&service_name("shop"), None);
        world.set_service(&service_name("shop-2"), Some(service("shop", 3, None)));
    });
    assert_eq!(droplets[1].1.has(), [8]);
}

#[tokio::test(start_paused = true)]
async fn a_droplet_that_is_away_is_waited_for_as_long_as_its_lease() {
    let hub = two_vpcs();
    let mut droplets = ["a", "b"].map(|name| (name, Droplet::open(&hub, name)));
    set(&hub, "web", Some(service("web", 1, None)));
    set(&hub, "web", None);
    set(&hub, "shop", Some(service("shop", 2, None)));
    for (name, droplet) in &mut droplets {
        droplet.ack(&hub, name);
    }
    assert!(resting(&hub, "shop"), "c is away");
    tokio::time::advance(LONGEST.saturating_sub(Duration::from_secs(1))).await;
    assert!(resting(&hub, "shop"));
    tokio::time::advance(Duration::from_secs(2)).await;
    assert!(!resting(&hub, "shop"));
    assert_eq!(droplets[0].1.has(), [8]);
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_gives_ports_to_whom_they_were_given() {
    let hub = two_vpcs();
    hub.distrust_node_ports(Duration::from_mins(10));
    let mut a = Droplet::open(&hub, "a");
    set(&hub, "web", Some(service("web", 1, Some([PORT].into()))));
    assert_eq!(a.has(), [VNI.get()], "recorded");
    set(&hub, "web", None);
    set(&hub, "shop", Some(service("shop", 2, Some(BTreeSet::new()))));
    assert_eq!(a.has(), [] as [u32; 0]);
    let (mut b, mut c) = (Droplet::open(&hub, "b"), Droplet::open(&hub, "c"));
    a.ack(&hub, "a");
    b.ack(&hub, "b");
    assert!(resting(&hub, "shop"), "who knows what c has");
    c.ack(&hub, "c");
    assert!(!resting(&hub, "shop"));
    assert_eq!(c.has(), [8]);
}
