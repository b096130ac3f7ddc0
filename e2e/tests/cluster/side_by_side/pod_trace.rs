//! `kubectl thuban trace`: it finds the pod's node, and names the pods of packets.

use std::thread;
use std::time::Duration;

use super::command_line::{Namespace, administrator};
use crate::support::{apply, netexec_manifest, running};
use crate::tenants::tenants;

const SPACE: &str = "cli-trace";

#[test]
fn a_trace_names_the_pods_of_packets() {
    let cluster = &tenants().cluster;
    let _namespace = Namespace::new(cluster, SPACE).unwrap();
    let pods = [("client", "node-a"), ("server", "node-b")];
    let pods = pods.map(|(name, node)| netexec_manifest(SPACE, name, node, None));
    apply(cluster, &pods).unwrap();
    let client = running(cluster, SPACE, "client").unwrap();
    let server = running(cluster, SPACE, "server").unwrap();
    let kubectl = cluster.instance().bin().join("kubectl");
    let line = format!(
        "trace -n {SPACE} client --count 4 --kubectl {}",
        kubectl.display()
    );
    // Packets are sent until the trace has seen some; it ends by itself after 30 s.
    let said = thread::scope(|scope| {
        let trace = scope.spawn(|| administrator(&line));
        while !trace.is_finished() {
            let _ = client.tcp(server.address, Duration::from_secs(1));
            thread::sleep(Duration::from_millis(200));
        }
        trace.join().unwrap()
    });
    assert_eq!(said.code, Some(0), "{said:?}");
    let lines: Vec<&str> = said.output.lines().collect();
    assert_eq!(lines.len(), 4, "{said:?}");
    assert!(lines.iter().all(|line| line.contains(" node-a ")), "{said:?}");
    let way =
        |line: &&str| line.contains(" cli-trace/client:") && line.contains(" > cli-trace/server:8080 tcp ");
    assert!(lines.iter().any(way), "{said:?}");
    assert!(said.error.contains("cli-trace/client is on node-a"), "{said:?}");
    let missing = administrator(&format!("trace -n {SPACE} nobody"));
    assert_eq!(missing.code, Some(2), "{missing:?}");
    assert!(missing.error.contains("no pod cli-trace/nobody"), "{missing:?}");
}
