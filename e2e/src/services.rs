//! Rows of services as transitd writes them, without its order and its Maglev: backends get the slots in turn.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::Result;
use thuban_common::services::{
    BackendEntry, BackendKey, CHUNK, HomeEntry, ServiceEntry, ServiceKey, SlotsEntry, SlotsKey,
};

use crate::programs::{Programs, address};

/// The number of slots of the tables here.
const SLOTS: u32 = 128;

/// A port of a service. `id` belongs to this port alone.
#[derive(Clone, Copy)]
pub struct Served {
    pub vni: u32,
    pub id: u32,
    pub service: IpAddr,
    pub port: u16,
    pub protocol: u8,
    /// Affinity in seconds.
    pub affinity: u32,
    pub flags: u32,
}

impl Served {
    pub fn new(vni: u32, id: u32, service: IpAddr, port: u16, protocol: u8) -> Self {
        Self {
            vni,
            id,
            service,
            port,
            protocol,
            affinity: 0,
            flags: 0,
        }
    }

    /// Writes the rows with these backends, in the place of earlier backends.
    pub fn by(&self, programs: &mut Programs, backends: &[(IpAddr, u16)]) -> Result<()> {
        for (index, (backend, port)) in (0..).zip(backends) {
            let key = BackendKey {
                service: self.id,
                index,
            };
            programs.insert("BACKENDS", key, backend_entry(*backend, *port))?;
        }
        let slots = if backends.is_empty() { 0 } else { SLOTS };
        let entry = self.entry(slots);
        for chunk in 0..slots.div_ceil(CHUNK as u32) {
            let first = chunk as usize * CHUNK;
            let slots = SlotsEntry {
                backends: std::array::from_fn(|slot| ((first + slot) % backends.len()) as u16),
            };
            programs.insert(
                "SLOTS",
                SlotsKey {
                    table: self.id,
                    chunk,
                },
                slots,
            )?;
        }
        programs.insert("SERVICES", self.key(self.port, self.protocol), entry)?;
        programs.insert("SERVICES", self.key(0, 0), entry)?;
        let gone = (0..).skip(backends.len()).map(|index| BackendKey {
            service: self.id,
            index,
        });
        for key in gone {
            if programs.remove::<_, BackendEntry>("BACKENDS", &key).is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Writes a front's rows with these backends of a VPC, each with its droplet.
    pub fn by_fronts(
        &self,
        programs: &mut Programs,
        vni: u32,
        backends: &[(IpAddr, u16, Ipv4Addr)],
    ) -> Result<()> {
        for (index, (backend, port, droplet)) in (0..).zip(backends) {
            let key = BackendKey {
                service: self.id,
                index,
            };
            let entry = HomeEntry {
                service: self.id,
                index,
                vni,
                droplet: droplet.octets(),
                address: address(self.service),
                port: self.port.to_be(),
                protocol: self.protocol,
                padding: 0,
                backend: backend_entry(*backend, *port),
            };
            programs.insert("HOMES", key, entry)?;
        }
        let backends: Vec<_> = backends
            .iter()
            .map(|(address, port, _)| (*address, *port))
            .collect();
        self.by(programs, &backends)?;
        let own = ServiceEntry::own(vni, u32::from(!backends.is_empty()));
        programs.insert("SERVICES", self.key(0, 0), own)?;
        programs.set("FRONTED", 0, 1_u32)
    }

    /// Has the backends of a front that was at the same port be those before the last change of this one.
    pub fn was(&self, programs: &mut Programs, former: &Self) -> Result<()> {
        let key = ServiceKey {
            former: 1,
            ..self.key(self.port, self.protocol)
        };
        programs.insert("SERVICES", key, former.entry(SLOTS))
    }

    fn entry(&self, slots: u32) -> ServiceEntry {
        ServiceEntry {
            service: self.id,
            table: self.id,
            slots,
            affinity: self.affinity,
            used: 0,
            flags: self.flags,
        }
    }

    fn key(&self, port: u16, protocol: u8) -> ServiceKey {
        ServiceKey {
            vni: self.vni,
            address: address(self.service),
            port: port.to_be(),
            protocol,
            former: 0,
        }
    }
}

fn backend_entry(backend: IpAddr, port: u16) -> BackendEntry {
    BackendEntry {
        address: address(backend),
        port: port.to_be(),
        padding: 0,
    }
}
