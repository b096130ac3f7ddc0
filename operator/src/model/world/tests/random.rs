//! Random changes of a world.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_api::Dscp;
use thuban_rows::builders::vni;

use super::super::services::tests::{exposed, service};
use super::super::{Network, Role, RoleId, Vpc, World};
use super::{address6, bouncer, divider, droplet_address, dual, endpoint, limits, network, vpc};

/// Rates of pods.
const RATES: [&str; 2] = ["1M", "1G"];

/// xorshift: small, and its seed is printed.
pub(super) struct Random(pub(super) u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }

    fn droplet(&mut self) -> Option<String> {
        let number = self.below(6);
        (number < 5).then(|| format!("d{number}"))
    }

    fn role(&mut self, parent: String) -> Role {
        Role {
            parent,
            serves_on: self.droplet(),
            placed_on: self.droplet(),
            ..Role::default()
        }
    }

    fn vpc(&mut self, number: u64) -> Vpc {
        Vpc {
            host_access: number.is_multiple_of(2) && self.below(4) > 0,
            egress: self.below(2) == 0,
            egress_rate: (self.below(2) == 0).then(|| "10M".parse().unwrap()),
            reject: self.below(2) == 0,
            dscp: Dscp::new(self.below(100) as u8),
            shared: vec![("ns".to_owned(), ["web", "db"][self.below(2) as usize].to_owned())],
            ..vpc(1 + (number % 2) as u32)
        }
    }

    fn network(&mut self, number: u64) -> Network {
        Network {
            private: self.below(2) == 0,
            limits: limits(RATES[self.below(2) as usize]),
            ..network(&format!("v{}", number % 2), 1 + number as u32)
        }
    }

    /// One object or subscription comes, changes or goes.
    pub(super) fn change(&mut self, world: &mut World) {
        let number = self.below(5);
        let present = self.below(4) > 0;
        match self.below(12) {
            11 => world.set_namespace(
                ["ns", "other"][self.below(2) as usize],
                present.then(|| format!("n{number}")).as_deref(),
            ),
            9.. => self.change_service(world, present),
            8 => world.set_away(&format!("d{number}"), present),
            0 if self.below(3) == 0 => {
                let address6 = Ipv6Addr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, number as u16 + 1]);
                world.set_droplet6(&format!("d{number}"), present.then_some(address6));
            }
            0 => world.set_droplet(&format!("d{number}"), present.then(|| droplet_address(number))),
            1 => world.set_vpc(&format!("v{}", number % 2), present.then(|| self.vpc(number))),
            2 => world.set_network(&format!("n{number}"), present.then(|| self.network(number))),
            3 => {
                let role = self.role(format!("v{}", number % 2));
                self.change_role(world, divider(&format!("div{number}")), present.then_some(role));
            }
            4 => {
                let role = self.role(format!("n{number}"));
                self.change_role(world, bouncer(&format!("bnc{number}")), present.then_some(role));
            }
            5 => self.change_subscription(world, present),
            _ => self.change_endpoint(world, present),
        }
    }

    fn change_service(&mut self, world: &mut World, present: bool) {
        // Ten services of five addresses: the younger of two has it.
        let number = self.below(10);
        let mut service = service(
            &format!("n{}", self.below(5)),
            &number.to_string(),
            self.below(3) as u8,
        );
        service.tables[0].0 = service_address(number % 5);
        let name = ("ns".to_owned(), format!("s{number}"));
        service.by_node = self.below(3) == 0;
        if self.below(3) == 0 {
            service.exposed = exposed(30000 + number as u16);
            service.exposed[0].0 = service.tables[0].0;
            service.by_peers = self.below(2) == 0;
        }
        let home = format!("d{}", self.below(5));
        let backend = service.tables[0].1[0].backends.first().unwrap().address;
        service.homes = [(backend, home)].into();
        service.tables[0].1[0].local = self.below(3) == 0;
        if self.below(4) == 0 {
            // Claimed, so nobody else's.
            let own = IpAddr::from([10, 0, 1, 100 + number as u8]);
            let ports = service.tables[0].1.clone();
            service.tables.push((own, ports));
            service.own_addresses = vec![own];
        }
        for (_, ports) in &mut service.exposed {
            let backends = service.tables[0].1[0].backends.clone();
            ports[0].local = (self.below(2) == 0).then_some(backends);
        }
        world.set_service(&name, present.then_some(service));
    }

    fn change_role(&mut self, world: &mut World, id: RoleId, role: Option<Role>) {
        match self.below(5) {
            0 => world.publish_role(id),
            1 => world.unpublish_role(id),
            2 => world.purge_role(id),
            _ => world.set_role(id.kind, id.name, role),
        }
    }

    fn change_subscription(&mut self, world: &mut World, present: bool) {
        let host = self.below(40);
        let address = match self.below(3) {
            0 => Ipv4Addr::from(0x0a00_0000 + host as u32).into(),
            1 => service_address(host % 5),
            _ => address6(host).into(),
        };
        world.subscribe(
            &format!("d{}", self.below(5)),
            vni(1 + self.below(2) as u32),
            address,
            present,
        );
    }

    fn change_endpoint(&mut self, world: &mut World, present: bool) {
        // Every host has its own network, as a claim guarantees within a VPC.
        let host = self.below(40);
        let make = if self.below(2) == 0 { endpoint } else { dual };
        let mut new = make(&format!("n{}", host % 5), self.below(5), host);
        new.previous = self.droplet();
        new.asked.egress = RATES
            .get(self.below(3) as usize)
            .map(|rate| rate.parse().unwrap());
        if self.below(5) == 0 {
            new.droplet.clear();
        }
        world.set_endpoint(&("ns".into(), format!("e{host}")), present.then_some(new));
    }
}

fn service_address(number: u64) -> IpAddr {
    Ipv4Addr::from(0x0a60_0000 + number as u32).into()
}
