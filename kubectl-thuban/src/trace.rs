//! `trace`: has transitd trace a pod on its node, and prints the packets with the names of pods and nodes.
//!
//! The programs of the node tell what they see; here it is only put into words. Names are those of the moment in which
//! the trace began, of Endpoints that the user may see.

use std::collections::HashMap;
use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use thuban_api::{Droplet, Endpoint, Vpc};
use thuban_common::packet::ipv4::protocol_word;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::arguments::{Format, Trace};
use crate::endpoints::Row;
use crate::error::CliError;
use crate::fetch::{Cluster, Scope};
use crate::kubectl::{Kubectl, Place};
use crate::render;
use crate::report::Verdict;
use crate::why;

/// How long a trace takes at most. A trace without an end would last on the node if this process is killed.
const SECONDS: u64 = 30;
const FOLLOW_SECONDS: u64 = 3_600;
/// How many packets are shown if the user does not say it.
const PACKETS: u64 = 100;
/// How transitd begins what it says of a dropped packet.
const DROPPED: &str = "dropped, ";

/// Traces a pod, and prints each packet as soon as it is seen.
pub async fn run(
    cluster: &Cluster,
    kubectl: &Kubectl,
    trace: &Trace,
    format: Format,
) -> Result<Verdict, CliError> {
    let (namespace, name) = why::pod(&trace.pod, cluster.namespace())?;
    let pod = cluster.pod(&namespace, &name).await?;
    let pod = pod.ok_or_else(|| CliError::PodNotFound {
        namespace: namespace.clone(),
        pod: name.clone(),
    })?;
    let full_name = format!("{namespace}/{name}");
    let node = node_of(&pod, &full_name)?;
    let transitd = cluster.transitd_on(node).await?;
    let place = Place {
        namespace: cluster.system_namespace().to_owned(),
        pod: transitd.ok_or_else(|| CliError::NoTransitd(node.to_owned()))?,
        container: "transitd",
    };
    let names = names(cluster).await?;
    let command = command(&full_name, trace);
    let command: Vec<&str> = command.iter().map(String::as_str).collect();
    eprintln!("{full_name} is on {node}");
    let mut child = kubectl
        .exec_command(&place, &command)
        .spawn()
        .map_err(|error| kubectl.not_started(error))?;
    let mut printer = Printer {
        names,
        node: node.to_owned(),
        start: None,
        packets: 0,
        drops: 0,
    };
    if let Some(output) = child.stdout.take() {
        let mut lines = BufReader::new(output).lines();
        while let Some(line) = lines.next_line().await? {
            render::write(&printer.line(&line, format)?)?;
        }
    }
    if !child.wait().await?.success() {
        return Err(CliError::TraceEnded(node.to_owned()));
    }
    eprintln!("{} packets, {} dropped", printer.packets, printer.drops);
    Ok(Verdict::from_findings(printer.drops > 0, false))
}

/// Returns the node of a pod that Thuban connects.
fn node_of<'a>(pod: &'a Pod, name: &str) -> Result<&'a str, CliError> {
    let spec = pod.spec.as_ref();
    if spec.and_then(|spec| spec.host_network).unwrap_or_default() {
        return Err(CliError::OnHostNetwork(name.to_owned()));
    }
    let node = spec.and_then(|spec| spec.node_name.as_deref());
    node.ok_or_else(|| CliError::NotBound(name.to_owned()))
}

/// Returns the command that transitd's pod runs.
fn command(pod: &str, trace: &Trace) -> Vec<String> {
    let (seconds, packets) = match (trace.follow, trace.count) {
        (true, count) => (FOLLOW_SECONDS, count),
        (false, count) => (SECONDS, Some(count.unwrap_or(PACKETS))),
    };
    let mut command = ["/bin/transitd", "trace", "--json", "--pod", pod, "--seconds"]
        .map(str::to_owned)
        .to_vec();
    command.push(seconds.to_string());
    if let Some(packets) = packets {
        command.extend(["--count".to_owned(), packets.to_string()]);
    }
    command
}

/// Asks for the names; tells which of them the user may not see.
async fn names(cluster: &Cluster) -> Result<Names, CliError> {
    let (vpcs, endpoints, droplets) =
        tokio::try_join!(cluster.vpcs(), cluster.endpoints(Scope::All), cluster.droplets())?;
    let mut names = Names::default();
    match (vpcs, endpoints.list) {
        (Ok(vpcs), Ok(endpoints)) => names.add_endpoints(&vpcs, &endpoints),
        (Err(unseen), _) | (_, Err(unseen)) => eprintln!("no names of pods: {unseen}"),
    }
    match droplets {
        Ok(droplets) => names.add_nodes(&droplets),
        Err(unseen) => eprintln!("no names of nodes: {unseen}"),
    }
    Ok(names)
}

/// Names of addresses.
#[derive(Clone, Debug, Default)]
struct Names {
    /// By the VPC's number.
    of_vpcs: HashMap<(u64, IpAddr), String>,
    nodes: HashMap<IpAddr, String>,
}

impl Names {
    fn add_endpoints(&mut self, vpcs: &[Vpc], endpoints: &[Endpoint]) {
        let number = |vpc: &Vpc| Some((vpc.metadata.name.clone()?, u64::from(vpc.status.as_ref()?.vni?)));
        let numbers: HashMap<String, u64> = vpcs.iter().filter_map(number).collect();
        for row in endpoints.iter().map(Row::of) {
            let name = match (&row.pod, &row.service) {
                (Some(pod), _) => format!("{}/{pod}", row.namespace),
                (None, Some(service)) => format!("svc/{}/{service}", row.namespace),
                (None, None) => continue,
            };
            let Some(number) = numbers.get(&row.vpc) else {
                continue;
            };
            for address in row.addresses.iter().filter_map(|address| address.parse().ok()) {
                self.of_vpcs.insert((*number, address), name.clone());
            }
        }
    }

    fn add_nodes(&mut self, droplets: &[Droplet]) {
        for droplet in droplets {
            if let Ok(address) = droplet.spec.ip.parse() {
                self.nodes.insert(address, droplet.spec.node.clone());
            }
        }
    }

    /// Returns the name of an end of a packet; none for one that has none.
    fn end(&self, record: &Value, address: &str) -> Option<&str> {
        let address: IpAddr = record[address].as_str()?.parse().ok()?;
        let name = self.of_vpcs.get(&(record["vni"].as_u64()?, address));
        name.map(String::as_str)
    }

    /// Returns the node to which the packet goes next; its address if its name is unknown.
    fn next<'a>(&'a self, record: &'a Value) -> Option<&'a str> {
        let text = record["next"].as_str()?;
        let name = text
            .parse()
            .ok()
            .and_then(|address: IpAddr| self.nodes.get(&address));
        Some(name.map_or(text, String::as_str))
    }
}

/// Puts records into words.
#[derive(Debug)]
struct Printer {
    names: Names,
    node: String,
    /// The time of the first record, in nanoseconds.
    start: Option<u64>,
    packets: u64,
    drops: u64,
}

impl Printer {
    /// Returns what is printed for a line of transitd. What is no record is printed as it is.
    fn line(&mut self, line: &str, format: Format) -> Result<String, CliError> {
        let Ok(mut record @ Value::Object(_)) = serde_json::from_str::<Value>(line) else {
            return Ok(format!("{line}\n"));
        };
        if let Some(lost) = record["lost"].as_u64() {
            return self.lost(lost, record, format);
        }
        self.packets += 1;
        if record["verdict"]
            .as_str()
            .is_some_and(|verdict| verdict.starts_with(DROPPED))
        {
            self.drops += 1;
        }
        if matches!(format, Format::Table | Format::Wide) {
            return Ok(self.text(&record));
        }
        for (field, end) in [("sourceName", "source"), ("destinationName", "destination")] {
            record[field] = json!(self.names.end(&record, end));
        }
        record["nextNode"] = json!(self.names.next(&record));
        record["node"] = json!(self.node);
        object(&record, format)
    }

    /// Returns what is printed for records that transitd has lost.
    fn lost(&self, lost: u64, mut record: Value, format: Format) -> Result<String, CliError> {
        if matches!(format, Format::Table | Format::Wide) {
            let place = if record["where"] == "ring" {
                "records on the node (ring full)"
            } else {
                "records (the reader was slow)"
            };
            return Ok(format!("lost: {lost} {place}\n"));
        }
        record["node"] = json!(self.node);
        object(&record, format)
    }

    /// Returns a record as a sentence.
    fn text(&mut self, record: &Value) -> String {
        let time = record["monotonicNs"].as_u64().unwrap_or_default();
        let micros = time.saturating_sub(*self.start.get_or_insert(time)) / 1_000;
        let word = |field: &str| record[field].as_str().unwrap_or_default();
        let mut text = format!(
            "+{}.{:06} {} {:<11} {} > {} {} {} bytes: {}",
            micros / 1_000_000,
            micros % 1_000_000,
            self.node,
            word("point"),
            self.end(record, "source", "sourcePort"),
            self.end(record, "destination", "destinationPort"),
            protocol(record["protocol"].as_u64().unwrap_or_default()),
            record["length"],
            word("verdict"),
        );
        if let Some(policies) = denied_by(&record["deniedBy"]) {
            // Words of transitd's own text.
            let way = if word("verdict").starts_with(DROPPED) {
                " by"
            } else {
                ", on its way out denied by"
            };
            let _ = write!(text, "{way} {policies}");
        }
        if let Some(next) = self.names.next(record) {
            let _ = write!(text, " to {next}");
        }
        text.push('\n');
        text
    }

    /// Returns an end of a packet: its name or its address, and its port if it has one.
    fn end(&self, record: &Value, address: &str, port: &str) -> String {
        let port = record[port].as_u64().and_then(|port| u16::try_from(port).ok());
        let port = port.filter(|port| *port != 0);
        let text = record[address].as_str().unwrap_or_default();
        match (self.names.end(record, address), port, text.parse()) {
            (Some(name), Some(port), _) => format!("{name}:{port}"),
            (Some(name), None, _) => name.to_owned(),
            (None, Some(port), Ok(address)) => SocketAddr::new(address, port).to_string(),
            (None, _, _) => text.to_owned(),
        }
    }
}

fn object(record: &Value, format: Format) -> Result<String, CliError> {
    Ok(match format {
        Format::Yaml => format!("---\n{}", serde_yaml_ng::to_string(record)?),
        _ => format!("{record}\n"),
    })
}

/// Returns the policies that deny a packet; none if no policy does.
fn denied_by(denier: &Value) -> Option<String> {
    let policies = denier["policies"].as_array()?.iter();
    let policies: Vec<&str> = policies.filter_map(Value::as_str).collect();
    if policies.is_empty() {
        return None;
    }
    let mut text = policies.join(", ");
    if let Some(rule) = denier["rule"].as_u64() {
        let _ = write!(text, " rule {rule}");
    }
    Some(text)
}

fn protocol(number: u64) -> String {
    let word = u8::try_from(number).ok().and_then(protocol_word);
    word.map_or_else(|| format!("protocol {number}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::{Value, json};

    use super::{Names, Printer, command, node_of};
    use crate::arguments::{Format, Trace};
    use crate::testing;

    fn printer() -> Printer {
        let objects = testing::status();
        let mut names = Names::default();
        let (vpcs, endpoints) = (
            objects.tenancy.vpcs.unwrap(),
            objects.tenancy.endpoints.list.unwrap(),
        );
        names.add_endpoints(&vpcs, &endpoints);
        names.add_nodes(&objects.droplets.unwrap()[..1]);
        Printer {
            names,
            node: "node-a".to_owned(),
            start: None,
            packets: 0,
            drops: 0,
        }
    }

    /// The number of the VPC `red`.
    fn red() -> u64 {
        let vpcs = testing::status().tenancy.vpcs.unwrap();
        let red = vpcs
            .iter()
            .find(|vpc| vpc.metadata.name.as_deref() == Some("red"));
        u64::from(red.unwrap().status.as_ref().unwrap().vni.unwrap())
    }

    fn record(source: &str, destination: &str, verdict: &str) -> Value {
        json!({"monotonicNs": 5_000_000_000_u64, "point": "agent_tc", "interface": "thb1", "vni": red(),
            "source": source, "destination": destination, "protocol": 6, "sourcePort": 40000,
            "destinationPort": 80, "length": 74, "verdict": verdict, "deniedBy": null, "next": null})
    }

    #[test]
    fn pods_services_and_nodes_have_their_names() {
        let mut printer = printer();
        let mut seen = record("10.0.1.2", "10.96.0.7", "sent_direct");
        seen["next"] = json!("192.0.2.11");
        let text = printer.line(&seen.to_string(), Format::Table).unwrap();
        assert_eq!(
            text,
            "+0.000000 node-a agent_tc    red/web-1:40000 > svc/red/shop:80 tcp 74 bytes: sent_direct to node-a\n"
        );
        seen["monotonicNs"] = json!(5_001_234_000_u64);
        // The same address in another VPC is another's.
        seen["vni"] = json!(red() + 1000);
        seen["next"] = json!("192.0.2.99");
        let text = printer.line(&seen.to_string(), Format::Table).unwrap();
        assert!(
            text.starts_with("+0.001234 node-a agent_tc    10.0.1.2:40000 > 10.96.0.7:80 "),
            "{text}"
        );
        assert!(text.ends_with(" to 192.0.2.99\n"), "{text}");
        assert_eq!((printer.packets, printer.drops), (2, 0));
    }

    #[test]
    fn drops_are_counted_and_have_their_policies() {
        let mut printer = printer();
        let mut seen = record("10.0.1.2", "fd00::1", "dropped, policy_ingress");
        seen["deniedBy"] = json!({"reason": "NoRule", "policies": ["red/deny", "red/more"]});
        let text = printer.line(&seen.to_string(), Format::Table).unwrap();
        assert!(
            text.ends_with("[fd00::1]:80 tcp 74 bytes: dropped, policy_ingress by red/deny, red/more\n"),
            "{text}"
        );
        seen["verdict"] = json!("to_host");
        seen["deniedBy"] = json!({"reason": "Rule", "policies": ["no-db"], "rule": 2});
        let text = printer.line(&seen.to_string(), Format::Table).unwrap();
        assert!(
            text.ends_with(": to_host, on its way out denied by no-db rule 2\n"),
            "{text}"
        );
        assert_eq!((printer.packets, printer.drops), (2, 1));
        assert_eq!(printer.line("no record", Format::Table).unwrap(), "no record\n");
        assert_eq!(printer.packets, 2);
    }

    #[test]
    fn json_has_what_transitd_says_and_the_names() {
        let mut printer = printer();
        let seen = record("10.0.1.2", "10.0.1.99", "delivered");
        let line = printer.line(&seen.to_string(), Format::Json).unwrap();
        let read: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(read["sourceName"], "red/web-1");
        assert!(read["destinationName"].is_null());
        assert_eq!((&read["node"], &read["length"]), (&json!("node-a"), &json!(74)));
    }

    #[test]
    fn lost_records_are_told_and_are_no_packets() {
        let mut printer = printer();
        let mut line = |place: &str, format| {
            let lost = json!({"lost": 7, "where": place}).to_string();
            printer.line(&lost, format).unwrap()
        };
        assert_eq!(
            line("reader", Format::Table),
            "lost: 7 records (the reader was slow)\n"
        );
        assert_eq!(
            line("ring", Format::Table),
            "lost: 7 records on the node (ring full)\n"
        );
        let read: Value = serde_json::from_str(&line("ring", Format::Json)).unwrap();
        assert_eq!(read, json!({"lost": 7, "where": "ring", "node": "node-a"}));
        assert_eq!((printer.packets, printer.drops), (0, 0));
    }

    #[test]
    fn a_trace_always_ends() {
        let line = |count, follow| {
            let trace = Trace {
                pod: "web-0".to_owned(),
                count,
                follow,
            };
            command("red/web-0", &trace)[3..].join(" ")
        };
        assert_eq!(line(None, false), "--pod red/web-0 --seconds 30 --count 100");
        assert_eq!(line(Some(5), false), "--pod red/web-0 --seconds 30 --count 5");
        assert_eq!(line(None, true), "--pod red/web-0 --seconds 3600");
        assert_eq!(line(Some(5), true), "--pod red/web-0 --seconds 3600 --count 5");
    }

    #[test]
    fn a_pod_that_has_no_trace_says_why() {
        let pod = |spec: Value| -> Pod { testing::object(json!({"spec": spec})) };
        let bound = pod(json!({"containers": [], "nodeName": "node-a"}));
        assert_eq!(node_of(&bound, "red/a").unwrap(), "node-a");
        let waits = node_of(&pod(json!({"containers": []})), "red/a")
            .unwrap_err()
            .to_string();
        assert!(waits.contains("on no node yet"), "{waits}");
        let host = pod(json!({"containers": [], "nodeName": "node-a", "hostNetwork": true}));
        let refused = node_of(&host, "red/a").unwrap_err().to_string();
        assert!(refused.contains("host network"), "{refused}");
    }
}
