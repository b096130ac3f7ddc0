//! `flows`: prints flows with the names that thuban-observe gives them, each as soon as it is told.
//!
//! A line of thuban-observe is a flow, or says what was lost. What is neither is printed as it is.

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::client::{Lines, Relay};
use super::error::ObserveError;
use super::{Asked, Target};
use crate::arguments::{FlowVerdict, Flows, Format};
use crate::error::CliError;
use crate::explain::{Explanation, explain};
use crate::render;
use crate::report::Verdict;

/// The columns of an end before a longer one is seen.
const END_WIDTH: usize = 16;
/// The columns of a time of day.
const TIME_WIDTH: usize = 8;
const TITLES: [&str; 3] = ["TIME", "FROM", "TO"];
const WIDE_TITLES: &str = "    BYTES  VPC               FLAGS      ";
/// What stands in place of an end in another namespace.
const WITHHELD: &str = "(withheld)";

/// Prints the flows that were asked for, and the following ones if that was asked for, too.
pub async fn print(relay: &Relay, flows: &Flows, printer: &mut Printer) -> Result<(), CliError> {
    let body = relay.ask(&target(flows, &relay.asked)).await?;
    let mut lines = Lines::new(body);
    while let Some(line) = lines.next().await? {
        render::write(&printer.line(&line)?)?;
    }
    if flows.follow {
        return Err(ObserveError::Ended.into());
    }
    if printer.flows == 0 {
        eprintln!(
            "thuban-observe remembers no such flow of {}; by default it hears of dropped packets alone \
             (THUBAN_FLOWS=drops)",
            relay.asked
        );
    }
    Ok(())
}

fn target(flows: &Flows, asked: &Asked) -> Target {
    let since = flows.since.map(|seconds| seconds.to_string());
    let last = flows.last.map(|count| count.to_string());
    Target::new("/v1/flows", asked)
        .with("vpc", flows.vpc.as_deref())
        .with("pod", flows.pod.as_deref())
        .with("peer", flows.peer.as_deref())
        .with("verdict", flows.verdict.map(FlowVerdict::word))
        .with("since", since.as_deref())
        .with("last", last.as_deref())
        .with("follow", flows.follow.then_some("true"))
}

/// A line of thuban-observe.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Told {
    Lost {
        lost: Lost,
        droplet: Option<String>,
        time_unix_ms: Option<i64>,
    },
    Flow(Box<Flow>),
}

/// How many events were lost, by the place.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Lost {
    budget: u64,
    table: u64,
    ring: u64,
    stream: u64,
    reader: u64,
}

impl Lost {
    /// Yields the places where events were lost.
    fn places(&self) -> impl Iterator<Item = (u64, &'static str)> {
        let places = [
            (self.budget, "budget"),
            (self.table, "table"),
            (self.ring, "ring"),
            (self.stream, "stream"),
            (self.reader, "reader"),
        ];
        places.into_iter().filter(|(lost, _)| *lost > 0)
    }
}

#[derive(Debug, Deserialize)]
struct Flow {
    time_unix_ms: i64,
    from: End,
    to: End,
    protocol: String,
    packets: u64,
    bytes: u64,
    verdict: String,
    reason: String,
    event: Option<String>,
    vpc: Option<String>,
    #[serde(default)]
    tcp_flags: Vec<String>,
    droplet: Option<String>,
    next: Option<String>,
    denied_by: Option<Denier>,
}

/// An end of a flow, of which thuban-observe may know or say only a part.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct End {
    withheld: bool,
    namespace: Option<String>,
    pod: Option<String>,
    /// With its namespace.
    service: Option<String>,
    node: Option<String>,
    address: Option<String>,
    port: Option<u16>,
}

#[derive(Debug, Deserialize)]
struct Denier {
    policy: String,
    rule: Option<u64>,
}

impl End {
    /// Returns the name of the end, or its address, and its port if it has one.
    fn text(&self) -> String {
        if self.withheld {
            return WITHHELD.to_owned();
        }
        let name = match (&self.namespace, &self.pod, &self.service, &self.node) {
            (Some(namespace), Some(pod), ..) => Some(format!("{namespace}/{pod}")),
            (_, _, Some(service), _) => Some(format!("svc/{service}")),
            (.., Some(node)) => Some(format!("node/{node}")),
            _ => None,
        };
        let port = self.port.filter(|port| *port != 0);
        let address = self.address.as_deref().unwrap_or("?");
        match (name, port, address.parse::<IpAddr>()) {
            (Some(name), Some(port), _) => format!("{name}:{port}"),
            (Some(name), None, _) => name,
            (None, Some(port), Ok(address)) => SocketAddr::new(address, port).to_string(),
            (None, _, _) => address.to_owned(),
        }
    }
}

impl Flow {
    fn is_dropped(&self) -> bool {
        self.verdict == "dropped"
    }

    /// Returns what happened to the packets, and where.
    fn outcome(&self, is_wide: bool) -> String {
        let known = explain(&self.reason);
        let known = known
            .iter()
            .find(|explanation| self.is_dropped() && explanation.of == "drop");
        let mut text = if self.is_dropped() {
            self.drop(known)
        } else {
            self.reason.clone()
        };
        // It is empty if it would tell the place of an end that is withheld.
        let droplet = self.droplet.as_deref().filter(|droplet| !droplet.is_empty());
        match (droplet, &self.next) {
            (Some(droplet), Some(next)) => {
                let _ = write!(text, ", {droplet} > {next}");
            }
            (Some(droplet), None) if is_wide || !self.is_dropped() => {
                let _ = write!(text, ", {droplet}");
            }
            _ => {}
        }
        // That packets are seen for the first time, or go on, needs no word.
        if let Some(event @ ("changed" | "ended")) = self.event.as_deref() {
            let _ = write!(text, " ({event})");
        }
        if let Some(known) = known.filter(|known| is_wide && !known.remedy.is_empty()) {
            let _ = write!(text, " -> {}", known.remedy);
        }
        text
    }

    fn drop(&self, known: Option<&Explanation>) -> String {
        let mut text = format!("DROPPED {}", self.reason);
        if let Some(Denier { policy, rule }) = &self.denied_by {
            let _ = write!(text, ": denied by {policy}");
            if let Some(rule) = rule {
                let _ = write!(text, " rule {rule}");
            }
        } else if let Some(known) = known {
            let _ = write!(text, ": {}", known.meaning);
        }
        text
    }
}

/// Puts lines into words, or into the format that is asked for.
#[derive(Debug)]
pub struct Printer {
    format: Format,
    has_titles: bool,
    widths: [usize; 2],
    flows: u64,
    drops: u64,
}

impl Printer {
    pub fn new(format: Format) -> Self {
        Self {
            format,
            has_titles: false,
            widths: [END_WIDTH; 2],
            flows: 0,
            drops: 0,
        }
    }

    /// Returns `Found` if packets were dropped.
    pub fn verdict(&self) -> Verdict {
        Verdict::from_findings(self.drops > 0, false)
    }

    /// Returns what is printed for a line.
    fn line(&mut self, line: &str) -> Result<String, CliError> {
        let told = serde_json::from_str::<Told>(line);
        if let Ok(Told::Flow(flow)) = &told {
            self.flows += 1;
            self.drops += u64::from(flow.is_dropped());
        }
        match self.format {
            Format::Json => Ok(format!("{line}\n")),
            Format::Yaml => {
                let value: Value = serde_json::from_str(line)?;
                Ok(format!("---\n{}", serde_yaml_ng::to_string(&value)?))
            }
            Format::Table | Format::Wide => Ok(match told {
                Ok(Told::Flow(flow)) => self.row(&flow),
                Ok(Told::Lost {
                    lost,
                    droplet,
                    time_unix_ms,
                }) => {
                    // It is empty if this reader was too slow.
                    let droplet = droplet.filter(|droplet| !droplet.is_empty());
                    losses(&lost, droplet.as_deref(), time_unix_ms)
                }
                Err(_) => format!("{line}\n"),
            }),
        }
    }

    /// Returns a flow as a row of the table, and the titles before the first one.
    fn row(&mut self, flow: &Flow) -> String {
        let is_wide = self.format == Format::Wide;
        let (from, to) = (flow.from.text(), flow.to.text());
        // Rows are printed as flows come, so a longer name widens the rows from here on.
        for (width, end) in self.widths.iter_mut().zip([&from, &to]) {
            *width = (*width).max(end.chars().count());
        }
        let [first, second] = self.widths;
        let mut text = String::new();
        if !self.has_titles {
            self.has_titles = true;
            let wide = if is_wide { WIDE_TITLES } else { "" };
            let [time, from, to] = TITLES;
            let _ = writeln!(
                text,
                "{time:<TIME_WIDTH$}  {from:<first$}  {to:<second$}  PROTO   PKTS  {wide}VERDICT"
            );
        }
        let wide = if is_wide {
            let (vpc, flags) = (flow.vpc.as_deref().unwrap_or("-"), flow.tcp_flags.join(","));
            format!("{:>9}  {vpc:<16}  {flags:<9}  ", flow.bytes)
        } else {
            String::new()
        };
        let _ = writeln!(
            text,
            "{:<TIME_WIDTH$}  {from:<first$}  {to:<second$}  {:<5}  {:>5}  {wide}{}",
            time(Some(flow.time_unix_ms)),
            flow.protocol,
            flow.packets,
            flow.outcome(is_wide)
        );
        text
    }
}

/// Returns a line for each place where events were lost.
fn losses(lost: &Lost, droplet: Option<&str>, at: Option<i64>) -> String {
    let mut text = String::new();
    let time = time(at);
    let droplet = droplet
        .map(|droplet| format!(" on {droplet}"))
        .unwrap_or_default();
    for (number, place) in lost.places() {
        let _ = writeln!(
            text,
            "{time:<TIME_WIDTH$}  lost: {number} events{droplet} ({place})"
        );
    }
    text
}

/// Returns the time of the day, in UTC.
fn time(unix_ms: Option<i64>) -> String {
    let time = unix_ms.and_then(|time| Timestamp::from_millisecond(time).ok());
    time.map(|time| time.strftime("%H:%M:%S").to_string())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
