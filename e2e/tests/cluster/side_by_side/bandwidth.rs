//! Limits of bandwidth on a cluster: a pod's annotations and its network's fields limit the pod from its first stream
//! on, and another annotation changes the limit while the pod runs.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use serde_json::{Value, json};

use crate::support::{Pod, apply, get, netexec_manifest, running};
use crate::tenant::{Tenant, manifests};
use crate::tenants::tenants;

const NAME: &str = "weir";
const EGRESS: &str = "kubernetes.io/egress-bandwidth";
const INGRESS: &str = "kubernetes.io/ingress-bandwidth";
/// Bytes of a stream. With a limit of [`SLOW`] they take some 2 s.
const BYTES: usize = 2 << 20;
const SLOW: &str = "8M";
const FAST: &str = "1G";
/// The least time of a limited stream: a burst passes at once.
const LIMITED: Duration = Duration::from_millis(1_800);
/// The most time of a stream without such a limit. A stream that a busy machine held up is sent again.
const UNLIMITED: Duration = Duration::from_secs(1);
/// A limit changes at most once in 30 s.
const CHANGED: Duration = Duration::from_mins(2);
const STREAM_TIMEOUT: Duration = Duration::from_secs(20);

fn manifest(name: &str, node: &str, limits: &[(&str, &str)]) -> Value {
    let mut pod = netexec_manifest(NAME, name, node, None);
    for (annotation, rate) in limits {
        pod["metadata"]["annotations"][*annotation] = json!(rate);
    }
    pod
}

/// Returns how long [`BYTES`] take from one pod to another.
fn took(from: &Pod, to: &Pod) -> Result<Duration> {
    let listener = to.inside(|| Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?))?;
    let address = SocketAddr::from((to.address, listener.local_addr()?.port()));
    let mut sending = from.inside(move || Ok(TcpStream::connect_timeout(&address, STREAM_TIMEOUT)?))?;
    sending.set_write_timeout(Some(STREAM_TIMEOUT))?;
    let (mut receiving, _) = listener.accept()?;
    receiving.set_read_timeout(Some(STREAM_TIMEOUT))?;
    let start = Instant::now();
    let sender = std::thread::spawn(move || sending.write_all(&vec![7; BYTES]));
    let mut received = Vec::new();
    receiving.read_to_end(&mut received)?;
    let took = start.elapsed();
    sender.join().map_err(|_| anyhow!("the sender panicked"))??;
    ensure!(received.len() == BYTES, "only {} bytes came", received.len());
    Ok(took)
}

#[test]
fn limits_come_from_annotations_and_network_and_change() {
    let cluster = &tenants().cluster;
    let mut objects = manifests(NAME, &["10.95.0.0/16"], &["10.95.1.0/24"]);
    objects[1]["spec"]["bandwidth"] = json!({"defaultIngress": SLOW});
    let tenant = Tenant::of(cluster, NAME, &objects).unwrap();
    let pods = [
        manifest("limited", "node-a", &[(EGRESS, SLOW)]),
        manifest("other", "node-b", &[(INGRESS, FAST)]),
    ];
    apply(cluster, &pods).unwrap();
    let [limited, other] = ["limited", "other"].map(|name| running(cluster, NAME, name).unwrap());
    for (from, to) in [(&limited, &other), (&other, &limited)] {
        let took = took(from, to).unwrap();
        assert!(took > LIMITED, "{} to {} took {took:?}", from.name, to.name);
    }
    let queue = || -> Result<Value> {
        Ok(get(cluster, &["droplets.thuban.dev", "node-a"])?["spec"]["limitQueue"].take())
    };
    cluster
        .wait_for("the queue of limits in the Droplet", CHANGED, || {
            let queue = queue()?;
            Ok(queue == "fifo" || queue == "fq_codel")
        })
        .unwrap();
    let rates = [EGRESS, INGRESS].map(|annotation| format!("{annotation}={FAST}"));
    let [egress, ingress] = &rates;
    cluster
        .kubectl(&[
            "annotate",
            "pod",
            "-n",
            NAME,
            "limited",
            "--overwrite",
            egress,
            ingress,
        ])
        .unwrap();
    for (from, to) in [(&limited, &other), (&other, &limited)] {
        let what = format!("another limit from {} to {}", from.name, to.name);
        cluster
            .wait_for(&what, CHANGED, || Ok(took(from, to)? < UNLIMITED))
            .unwrap();
    }
    tenant.remove().unwrap();
}
