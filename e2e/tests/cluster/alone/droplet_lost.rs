//! transitd of a node hangs: its droplet is Suspect, its roles move, and no packet is lost, because the programs keep
//! running. Meanwhile `kubectl thuban why` names the bouncer without a stream, and then the droplet. If kubelet hangs,
//! too, Kubernetes loses the node, and the droplet is NotReady.

use std::time::{Duration, Instant};

use anyhow::Result;
use thuban_cluster::Cluster;

use crate::flows::{none_lost_while, settled, wait_settled};
use crate::leadership::{JUDGING, wait_led};
use crate::path_questions::{Expected, named, wait_answer};
use crate::side_by_side::command_line::{Said, administrator};
use crate::support::{Hanging, condition, get};
use crate::tenants::tenants;

/// How long the operator may take to lose the stream of a transitd that hangs.
const LOST_TIMEOUT: Duration = Duration::from_mins(1);

/// Whether kubelet hangs, too, until Kubernetes has lost the node: a minute more.
fn is_long() -> bool {
    std::env::var_os("THUBAN_E2E_LONG").is_some()
}

fn reason(cluster: &Cluster, droplet: &str) -> Result<String> {
    let droplet = get(cluster, &["droplets.thuban.dev", droplet])?;
    let ready = condition(&droplet, "Ready").map(|ready| ready["reason"].as_str().unwrap_or_default());
    Ok(ready.unwrap_or_default().to_owned())
}

/// Asks what keeps packets between pods of `red-web` on two nodes.
fn why(from: &str, to: &str) -> Said {
    administrator(&format!("why red/red-web-{from} red/red-web-{to} -o json"))
}

#[test]
fn hung_droplet_turns_suspect_and_roles_move_without_loss() {
    let cluster = &tenants().cluster;
    let ways = tenants().ring("red-web");
    let before = wait_settled(cluster, "bouncers", "red-web", 1).unwrap();
    let node = before[0].as_str();
    let nodes = cluster.nodes().unwrap();
    let mut others = nodes.iter().filter(|other| *other != node);
    let (one, two) = (others.next().unwrap(), others.next().unwrap());
    wait_led(cluster, JUDGING).unwrap();
    none_lost_while("transitd hangs", &ways, || {
        let since = Instant::now();
        let hanging = Hanging::new(cluster, node, "transitd")?;
        let is = |wanted: &str| {
            let wanted = wanted.to_owned();
            move || Ok(reason(cluster, node)? == wanted)
        };
        // The only bouncer is there, and moves when the droplet is Suspect.
        let unserved = Expected::unknown("RolesNotServing", "bouncer");
        wait_answer(&unserved, LOST_TIMEOUT, &|| why(one, two))?;
        cluster.wait_for("Suspect", Duration::from_secs(90), is("Suspect"))?;
        let suspect = since.elapsed();
        named(&Expected::unknown("DropletSuspect", node), &|| why(one, node))?;
        cluster.wait_for("its bouncer elsewhere", Duration::from_secs(30), || {
            Ok(settled(cluster, "bouncers", "red-web", 1)?.is_some_and(|on| on[0] != node))
        })?;
        let moved = since.elapsed();
        eprintln!("{node} is Suspect after {suspect:.1?}, its bouncer works elsewhere after {moved:.1?}");
        if is_long() {
            let kubelet = Hanging::new(cluster, node, "kubelet")?;
            cluster.wait_for("NotReady", Duration::from_mins(2), is("NotReady"))?;
            eprintln!("{node} is NotReady after {:.1?}", since.elapsed());
            drop(kubelet);
            cluster.wait_for("Suspect again", Duration::from_mins(1), is("Suspect"))?;
        }
        drop(hanging);
        cluster.wait_for("Connected", Duration::from_secs(30), is("Connected"))
    });
}
