//! What becomes of a Vip by a user's request.

use kube::ResourceExt;
use thiserror::Error;
use thuban_api::{Vip, VipDns, VipSpec};

use super::arguments::Make;
use crate::service::is_of_service;

/// Why a request does not fit the Vip that is there.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Conflict {
    #[error("Vip {vip} is for Service {service}: give the new Vip another name")]
    OtherService { vip: String, service: String },
    #[error(
        "lbaasd made Vip {vip} for the Service of that name: change the Service, or give the new Vip another name"
    )]
    OfService { vip: String },
    #[error("Vip {vip} is being deleted: wait until it is gone")]
    Ending { vip: String },
}

/// Returns the Vip as it is to be written; `None` if it is so already.
pub fn merge(existing: Option<&Vip>, request: &Make) -> Result<Option<Vip>, Conflict> {
    let mut vip = match existing {
        Some(existing) => existing.clone(),
        None => Vip::new(
            &request.name.name,
            serde_json::from_value::<VipSpec>(serde_json::json!({"service": request.service}))
                .unwrap_or_default(),
        ),
    };
    let name = || vip.name_any();
    if is_of_service(&vip) {
        return Err(Conflict::OfService { vip: name() });
    }
    if vip.metadata.deletion_timestamp.is_some() {
        return Err(Conflict::Ending { vip: name() });
    }
    if vip.spec.service != request.service {
        let service = vip.spec.service.clone();
        return Err(Conflict::OtherService { vip: name(), service });
    }
    change(&mut vip.spec, request, existing.is_none());
    let is_there = existing.is_some_and(|existing| existing.spec == vip.spec);
    Ok((!is_there).then_some(vip))
}

fn change(spec: &mut VipSpec, request: &Make, is_new: bool) {
    let port = request.vip_port();
    // No port stands for all of them.
    if is_new || (!spec.ports.is_empty() && !spec.ports.contains(&port)) {
        spec.ports.push(port);
    }
    if !request.profiles.is_empty() {
        spec.profiles.clone_from(&request.profiles);
    }
    if let Some(pool) = &request.pool {
        spec.pool.clone_from(pool);
    }
    if !request.addresses.is_empty() {
        spec.requested_ips = request.addresses.iter().map(ToString::to_string).collect();
    }
    if !request.families.is_empty() {
        spec.ip_families.clone_from(&request.families);
    }
    if let Some(mode) = request.mode {
        spec.mode = mode;
    }
    if let Some(name) = &request.dns_name {
        let ttl_seconds = spec.dns.as_ref().and_then(|dns| dns.ttl_seconds);
        spec.dns = Some(VipDns {
            name: name.clone(),
            ttl_seconds,
        });
    }
    if let Some(seconds) = request.drain_seconds {
        spec.drain_seconds = seconds;
    }
}

#[cfg(test)]
mod tests;
