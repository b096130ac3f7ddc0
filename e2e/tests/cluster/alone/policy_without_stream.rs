//! Policies change while a droplet has no stream: it holds the old ones until it is back, and the PolicyState says so.
//! A packet passes only if the policies before or after the change allow it.
//!
//! A leader judges no droplet in its first minute. Tests of this lane end no leader, so the minute is over. After a
//! test of the lane `control_plane` it would have to be waited for.

use std::time::Instant;

use anyhow::{Context, Result};
use thuban_cluster::Cluster;

use crate::audit::wait_sound;
use crate::control_plane::policy_changes::{
    CHANGE_TIMEOUT, Role, ingress, make, none_answers_while, policy, until,
};
use crate::leadership::{JUDGING, wait_led};
use crate::operator_stream::NoStream;
use crate::support::{Pod, apply, condition, get};
use crate::tenant::Tenant;
use crate::tenants::tenants;

/// The tenant of which a droplet has no stream.
const CUT_OFF: &str = "adrift";
/// Two servers, of which the second one's droplet has no stream.
const CUT_OFF_PODS: [Role; 5] = [
    ("server", "server", "node-a"),
    ("far", "server", "node-c"),
    ("friend", "friend", "node-b"),
    ("guest", "guest", "node-b"),
    ("stranger", "stranger", "node-a"),
];

/// Returns the status of the condition Provisioned of the servers' policy, and its message.
fn provisioned(cluster: &Cluster) -> Result<(bool, String)> {
    let state = get(cluster, &["policystates.thuban.dev/server", "-n", CUT_OFF])?;
    let own = condition(&state, "Provisioned").context("no condition yet")?;
    let message = own["message"].as_str().unwrap_or_default();
    Ok((own["status"] == "True", message.to_owned()))
}

/// Waits until the servers' policy is Provisioned or not, with this message.
fn wait_told(cluster: &Cluster, is_provisioned: bool, message: &str) -> Result<()> {
    let mut told = (false, String::new());
    let is_told = || -> Result<bool> {
        told = provisioned(cluster)?;
        Ok(told.0 == is_provisioned && told.1 == message)
    };
    cluster
        .wait_for(message, CHANGE_TIMEOUT, is_told)
        .with_context(|| format!("the last one told: {told:?}"))
}

/// Changes who may ask the servers while the droplet of the far one has no stream.
fn change_without_stream(
    cluster: &Cluster,
    [server, far, friend, guest]: [&Pod; 4],
    open: bool,
) -> Result<()> {
    let node = far.node.as_str();
    let cut = NoStream::new(cluster, node)?;
    apply(cluster, &[policy(CUT_OFF, "server", &ingress(open))])?;
    let missing = format!("2 of 3 droplets; {node}: no stream");
    wait_told(cluster, false, &missing)?;
    // The other droplets go on when this one is suspect.
    until(guest, server.address, open)?;
    until(friend, server.address, true)?;
    if open {
        // It has the old rules, and does not know the class that the new ones are about.
        until(guest, far.address, false)?;
    }
    wait_told(cluster, false, &missing)?;
    drop(cut);
    let start = Instant::now();
    wait_told(cluster, true, "3 of 3 droplets")?;
    let told = start.elapsed();
    until(guest, far.address, open)?;
    until(friend, far.address, true)?;
    eprintln!("{node} is said to follow {told:.3?} after its way to the operator is back");
    Ok(())
}

#[test]
fn a_droplet_without_stream_holds_the_old_policy_until_back() {
    let cluster = &tenants().cluster;
    let tenant = Tenant::new(cluster, CUT_OFF, &["10.94.0.0/16"], &["10.94.1.0/24"]).unwrap();
    let [server, far, friend, guest, stranger] = make(cluster, CUT_OFF, CUT_OFF_PODS);
    apply(cluster, &[policy(CUT_OFF, "server", &ingress(false))]).unwrap();
    wait_told(cluster, true, "3 of 3 droplets").unwrap();
    for address in [server.address, far.address] {
        until(&stranger, address, false).unwrap();
        until(&friend, address, true).unwrap();
        until(&guest, address, false).unwrap();
    }
    // A leader calls a droplet suspect only then.
    wait_led(cluster, JUDGING).unwrap();
    let pods = [&server, &far, &friend, &guest];
    none_answers_while(&stranger, &[server.address, far.address], || {
        for open in [true, false] {
            change_without_stream(cluster, pods, open).unwrap();
        }
    });
    tenant.remove().unwrap();
    wait_sound(cluster);
}
