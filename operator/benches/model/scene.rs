//! A cluster in which all is acked: VPCs of five networks with endpoints, each VPC on a few of the droplets.

use std::hint::black_box;
use std::net::Ipv4Addr;
use std::sync::{Arc, LazyLock};

use thuban_api::identifiers::{MacAddr, Vni};
use thuban_operator::model::acks::Acks;
use thuban_operator::model::bandwidth::{Bandwidth, Limits};
use thuban_operator::model::policy::Profile;
use thuban_operator::model::world::{
    Address, Endpoint, EndpointName, Membership, Network, Pod, Role, RoleKind, Vpc, World,
};
use thuban_rows::Kinds;
use thuban_rows::builders::{network_id, vni};

/// Endpoints on a droplet.
const ON_DROPLET: usize = 20;
/// Networks of a VPC, and endpoints of a network.
const NETWORKS: usize = 5;
const MEMBERS: usize = 20;
/// Droplets on which a VPC has endpoints.
const SPREAD: usize = 20;

/// The values of the label `app` of members, which take turns.
pub const APPS: [&str; 2] = ["web", "db"];

/// What policies see of members, by app.
static PROFILES: LazyLock<[Arc<Profile>; 2]> = LazyLock::new(|| {
    APPS.map(|app| {
        let profile = Profile {
            labels: [("app".to_owned(), app.to_owned())].into(),
            ..Profile::default()
        };
        profile.shared()
    })
});

pub struct Scene {
    pub world: World,
    pub acks: Acks,
    droplets: usize,
    /// Milliseconds.
    pub now: u64,
}

fn droplet(number: usize) -> String {
    format!("droplet-{number}")
}

pub fn network(vpc: usize, number: usize) -> String {
    format!("vpc-{vpc}-{number}")
}

pub fn name(network: &str, member: usize) -> EndpointName {
    (network.to_owned(), format!("pod-{member}"))
}

/// Returns a member's address. All VPCs have the same addresses.
pub fn address(number: usize, member: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, number as u8, member as u8 + 2)
}

/// Returns what policies see of a member.
pub fn profile(member: usize) -> Arc<Profile> {
    Arc::clone(&PROFILES[member % PROFILES.len()])
}

pub fn vni_of(vpc: usize) -> Vni {
    vni(vpc as u32 + 1)
}

pub fn endpoint(vpc: usize, number: usize, member: usize, on: String) -> Endpoint {
    let address = address(number, member);
    let network = network(vpc, number);
    Endpoint {
        droplet: on,
        previous: None,
        pod: Pod {
            namespace: network.clone(),
            name: format!("pod-{member}"),
            uid: format!("{network}-{member}"),
        },
        network,
        profile: Some(profile(member)),
        asked: Bandwidth::default(),
        is_host: false,
        membership: Membership::Member(Address {
            address,
            prefix_length: 24,
            gateway: Ipv4Addr::new(10, 0, number as u8, 1),
            mac: MacAddr::of(address),
            address6: None,
        }),
        ready: true,
    }
}

pub fn serving(parent: &str, on: String) -> Role {
    Role {
        parent: parent.to_owned(),
        serves_on: Some(on.clone()),
        placed_on: Some(on),
        ..Role::default()
    }
}

impl Scene {
    pub fn new(endpoints: usize) -> Self {
        let droplets = endpoints / ON_DROPLET;
        let mut scene = Self {
            world: World::default(),
            acks: Acks::new(0),
            droplets,
            now: 0,
        };
        for number in 0..droplets {
            let address = Ipv4Addr::from(0xac10_0001 + number as u32);
            scene.world.set_droplet(&droplet(number), Some(address));
        }
        for vpc in 0..endpoints / (NETWORKS * MEMBERS) {
            scene.add_vpc(vpc);
        }
        scene.world.flush();
        for number in 0..droplets {
            scene.open(&droplet(number));
        }
        scene
    }

    fn add_vpc(&mut self, vpc: usize) {
        let vpc_name = format!("vpc-{vpc}");
        let row = Vpc {
            vni: vni_of(vpc),
            cidrs: vec!["10.0.0.0/16".into()],
            host_access: false,
            egress: false,
            reject: false,
            egress_rate: None,
            dscp: None,
            shared: Vec::new(),
        };
        self.world.set_vpc(&vpc_name, Some(row));
        let divider = serving(&vpc_name, self.home(vpc, 0));
        self.world
            .set_role(RoleKind::Divider, &format!("{vpc_name}-d0"), Some(divider));
        for number in 0..NETWORKS {
            let network = network(vpc, number);
            let row = Network {
                vpc: vpc_name.clone(),
                id: network_id(number as u32 + 1),
                cidrs: vec![format!("10.0.{number}.0/24")],
                private: false,
                limits: Limits::default(),
            };
            self.world.set_network(&network, Some(row));
            for role in 0..2 {
                let bouncer = serving(&network, self.home(vpc, number + role));
                self.world
                    .set_role(RoleKind::Bouncer, &format!("{network}-b{role}"), Some(bouncer));
            }
            for member in 0..MEMBERS {
                let endpoint = endpoint(vpc, number, member, self.home(vpc, member));
                self.world.set_endpoint(&name(&network, member), Some(endpoint));
            }
        }
    }

    /// Returns how many VPCs there are.
    pub const fn vpcs(&self) -> usize {
        self.droplets * ON_DROPLET / (NETWORKS * MEMBERS)
    }

    /// Returns a VPC in the middle.
    pub const fn middle(&self) -> usize {
        self.droplets / 10
    }

    /// Returns a droplet on which a VPC has no endpoint.
    pub fn elsewhere(&self, vpc: usize) -> String {
        droplet((vpc * NETWORKS + SPREAD + 7) % self.droplets)
    }

    /// Returns one of the droplets of a VPC.
    pub fn home(&self, vpc: usize, number: usize) -> String {
        droplet((vpc * NETWORKS + number % SPREAD) % self.droplets)
    }

    pub fn open(&mut self, droplet: &str) {
        let snapshot = self.world.snapshot(droplet);
        let sequence = self
            .acks
            .open(droplet, (1, Kinds::all()), snapshot.rows.keys(), 0);
        self.acks.ack(droplet, 1, sequence, 0);
        black_box(snapshot);
    }

    /// Tells droplets what has changed, and has them ack it.
    pub fn settle(&mut self) {
        let acks = &self.acks;
        let deltas = self.world.flush_to(|droplet| acks.is_connected(droplet));
        for (droplet, delta) in &deltas {
            if let Some(sequence) = self.acks.send(droplet, delta, 0) {
                self.acks.ack(droplet, 1, sequence, 0);
            }
        }
        black_box(deltas);
    }

    /// An endpoint of a VPC in the middle comes to a droplet, and goes.
    pub fn come_and_go(&mut self, member: usize, on: String) {
        let vpc = self.middle();
        let name = name(&network(vpc, 0), member);
        let endpoint = endpoint(vpc, 0, member, on);
        self.world.set_endpoint(&name, Some(endpoint));
        self.settle();
        self.world.set_endpoint(&name, None);
        self.settle();
    }
}
