//! Addresses that users choose: an Endpoint that outlives its pods and moves with them, and pods that ask by
//! annotation.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::flows::while_flowing;
use crate::requests::ANSWER_TIMEOUT;
use crate::support::{apply, delete, get, netexec_manifest, running};
use crate::tenant::{Tenant, manifests};
use crate::tenants::tenants;

const MAC: &str = "ac:de:48:00:11:22";

/// Makes VPC, network and namespace `nomads`, where addresses may be asked for.
fn nomads(cluster: &Cluster) -> Tenant<'_> {
    let mut objects = manifests("nomads", &["10.21.0.0/16"], &["10.21.1.0/24"]);
    objects[1]["spec"]["allowStaticIPs"] = true.into();
    Tenant::of(cluster, "nomads", &objects).unwrap()
}

fn annotated(name: &str, node: &str, annotations: &[(&str, &str)]) -> Value {
    let mut pod = netexec_manifest("nomads", name, node, None);
    for (key, value) in annotations {
        pod["metadata"]["annotations"][format!("thuban.dev/{key}")] = (*value).into();
    }
    pod
}

fn endpoint(cluster: &Cluster, name: &str) -> Value {
    get(cluster, &["endpoints.thuban.dev", "-n", "nomads", name]).unwrap()
}

#[test]
fn endpoint_keeps_address_and_mac_when_its_pod_moves() {
    let cluster = &tenants().cluster;
    let tenant = nomads(cluster);
    let object = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Endpoint",
        "metadata": {"name": "db", "namespace": "nomads"},
        "spec": {"network": "nomads", "addresses": ["10.21.1.77"], "mac": MAC},
    });
    let has_it = [("endpoint", "db")];
    let pods = [
        annotated("sender", "node-b", &[]),
        annotated("db-1", "node-a", &has_it),
    ];
    apply(cluster, &[&[object], &pods[..]].concat()).unwrap();
    let sender = running(cluster, "nomads", "sender").unwrap();
    let first = running(cluster, "nomads", "db-1").unwrap();
    assert_eq!(first.address.to_string(), "10.21.1.77");
    let begin = Instant::now();
    let (mut gone, mut back) = (Duration::ZERO, Duration::ZERO);
    let tallies = while_flowing(&[(&sender, first.address)], ANSWER_TIMEOUT, || {
        std::thread::sleep(Duration::from_secs(2));
        gone = begin.elapsed();
        cluster.kubectl(&["delete", "pod", "-n", "nomads", "db-1", "--wait=false"])?;
        apply(cluster, &[annotated("db-2", "node-c", &has_it)])?;
        let second = running(cluster, "nomads", "db-2")?;
        back = begin.elapsed();
        assert_eq!((second.node.as_str(), second.address), ("node-c", first.address));
        let link = second.command(&["ip", "-o", "link", "show", "eth0"])?;
        assert!(link.contains(MAC), "{link}");
        std::thread::sleep(Duration::from_secs(2));
        Ok(())
    })
    .unwrap();
    let tally = &tallies[0];
    let pause = tally
        .lost
        .iter()
        .map(|lost| lost.at)
        .max()
        .map_or(Duration::ZERO, |last| last.saturating_sub(gone));
    eprintln!(
        "{} flows to an endpoint that moved in {:.1?}, {} lost within {pause:.1?}",
        tally.sent,
        back.saturating_sub(gone),
        tally.lost.len()
    );
    // Requests that wait for their answer when the pod goes are lost with it.
    let margin = Duration::from_secs(2);
    let strays: Vec<_> = tally
        .lost
        .iter()
        .filter(|lost| lost.at + margin < gone || lost.at > back)
        .collect();
    assert!(
        strays.is_empty(),
        "lost while a pod had it (gone {gone:?}, back {back:?}): {strays:?}"
    );
    cluster
        .wait_for("the move over", Duration::from_secs(30), || {
            let status = &endpoint(cluster, "db")["status"];
            Ok(status["previousDroplet"].is_null() && status["droplet"] == "node-c")
        })
        .unwrap();
    // Without a pod the Endpoint keeps its address.
    delete(cluster, &["pod", "-n", "nomads", "db-2"]).unwrap();
    assert_eq!(
        endpoint(cluster, "db")["status"]["addresses"],
        json!(["10.21.1.77"])
    );
    assert!(get(cluster, &["ipclaims.thuban.dev", "nomads.10.21.1.77"]).is_ok());
    tenant.remove().unwrap();
}

#[test]
fn pod_gets_requested_address_and_mac_or_event_with_reason() {
    let cluster = &tenants().cluster;
    let tenant = nomads(cluster);
    let asked = annotated("asks", "node-a", &[("ip", "10.21.1.50"), ("mac", MAC)]);
    apply(cluster, &[asked]).unwrap();
    let pod = running(cluster, "nomads", "asks").unwrap();
    assert_eq!(pod.address.to_string(), "10.21.1.50");
    let link = pod.command(&["ip", "-o", "link", "show", "eth0"]).unwrap();
    assert!(link.contains(MAC), "{link}");
    let refusals = [
        ("taken", [("ip", "10.21.1.50")], "10.21.1.50 is taken by Endpoint"),
        (
            "outside",
            [("ip", "10.21.9.9")],
            "ask for an address in 10.21.1.0/24",
        ),
        ("gateway", [("ip", "10.21.1.1")], "never given out"),
        ("garbled", [("ip", "ten")], "thuban.dev/ip"),
        ("multicast", [("mac", "01:00:00:00:00:01")], "thuban.dev/mac"),
    ];
    let pods: Vec<Value> = refusals
        .iter()
        .map(|(name, annotations, _)| annotated(name, "node-b", annotations))
        .collect();
    apply(cluster, &pods).unwrap();
    for (name, _, words) in refusals {
        let mut events = String::new();
        cluster
            .wait_for(
                &format!("an event of {name}: {words}"),
                Duration::from_secs(30),
                || {
                    let selector = format!("involvedObject.name={name}");
                    let arguments = ["events", "-n", "nomads", "--field-selector", &selector];
                    events = get(cluster, &arguments)?["items"].to_string();
                    Ok(events.contains(words))
                },
            )
            .unwrap_or_else(|error| panic!("{error:#}: {events}"));
    }
    tenant.remove().unwrap();
}

/// Step 7 of "Endpoint: create" in docs/workflows.md, and its counterpart in "Endpoint: delete".
#[test]
fn both_node_files_name_a_pod_from_its_creation_to_its_end() {
    let cluster = &tenants().cluster;
    let tenant = nomads(cluster);
    let node = "node-a";
    apply(cluster, &[annotated("filed", node, &[])]).unwrap();
    let pod = running(cluster, "nomads", "filed").unwrap();
    let object = get(cluster, &["pod", "-n", "nomads", "filed"]).unwrap();
    let uid = object["metadata"]["uid"].as_str().unwrap();
    // Prints `endpoints` and `attachments`, as far as a file there names the pod.
    let command = format!("cd /var/lib/thuban && grep -rlF {uid} endpoints attachments | cut -d/ -f1 | sort");
    let naming = || cluster.exec_on_node(node, &["sh", "-c", &command]);
    assert_eq!(naming().unwrap().trim(), "attachments\nendpoints");
    assert_eq!(pod.tcp(pod.address, ANSWER_TIMEOUT).unwrap(), pod.name);
    delete(cluster, &["pod", "-n", "nomads", "filed"]).unwrap();
    let mut left = String::new();
    cluster
        .wait_for("files without the pod", Duration::from_secs(30), || {
            left = naming()?;
            Ok(left.trim().is_empty())
        })
        .unwrap_or_else(|error| panic!("{error:#}: {left}"));
    tenant.remove().unwrap();
}

#[test]
fn appended_range_starts_pod_that_found_network_full() {
    let cluster = &tenants().cluster;
    let tenant = Tenant::new(cluster, "narrow", &["10.22.0.0/16"], &["10.22.1.0/30"]).unwrap();
    apply(cluster, &[netexec_manifest("narrow", "first", "node-a", None)]).unwrap();
    let first = running(cluster, "narrow", "first").unwrap();
    apply(cluster, &[netexec_manifest("narrow", "second", "node-b", None)]).unwrap();
    cluster
        .wait_for("the second one told why", Duration::from_secs(30), || {
            let events = get(cluster, &["events", "-n", "narrow"])?;
            Ok(events["items"].to_string().contains("append an IPv4 range"))
        })
        .unwrap();
    let since = Instant::now();
    let wider = ["10.22.1.0/30", "10.22.2.0/28"];
    apply(cluster, &manifests("narrow", &["10.22.0.0/16"], &wider)[1..2]).unwrap();
    let second = running(cluster, "narrow", "second").unwrap();
    eprintln!(
        "the waiting pod was ready {:.1?} after the range was appended",
        since.elapsed()
    );
    assert_eq!(second.address.octets()[2], 2);
    for (from, to) in [(&first, &second), (&second, &first)] {
        assert_eq!(from.tcp(to.address, crate::support::REACHED).unwrap(), to.name);
    }
    tenant.remove().unwrap();
}
