//! The API server's own numbers: requests by verb and resource, and how long it took to answer them.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use kube::Client;

/// The groups whose resources the operator alone writes: all requests are the operator's.
const GROUPS: [&str; 2] = ["thuban.dev", "events.k8s.io"];
const TOTAL: &str = "apiserver_request_total";
const BUCKETS: &str = "apiserver_request_duration_seconds_bucket";
const DISPATCHED: &str = "apiserver_flowcontrol_dispatched_requests_total";
/// The FlowSchemas of `install/`, which tell the requests of Thuban's ServiceAccounts from all others.
const FLOW_SCHEMAS: [&str; 2] = ["thuban", "thuban-leases"];

/// A verb on a resource, such as `PUT endpoints/status`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request {
    pub verb: String,
    pub resource: String,
}

/// Counters at one time, or their growth between two.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Requests for Thuban's kinds and events that succeeded.
    pub done: BTreeMap<Request, f64>,
    /// Requests for the same that were refused: conflicts and objects that exist already.
    pub refused: BTreeMap<Request, f64>,
    /// Requests of every kind from all of Thuban: reads and the beginnings of watches, too.
    pub from_thuban: f64,
    /// Bounds in seconds (as text, for order), each with how many writes of pods and of Thuban's kinds took at most
    /// that long.
    buckets: BTreeMap<String, f64>,
}

/// Reads the metrics from the API server.
pub async fn read(client: &Client) -> Result<Metrics> {
    let request = http::Request::get("/metrics")
        .body(Vec::new())
        .context("a request of metrics")?;
    let text = client
        .request_text(request)
        .await
        .context("metrics of the API server")?;
    Ok(parse(&text))
}

fn parse(text: &str) -> Metrics {
    let mut metrics = Metrics::default();
    for line in text.lines() {
        let Some((name, rest)) = line.split_once('{') else {
            continue;
        };
        if ![TOTAL, BUCKETS, DISPATCHED].contains(&name) {
            continue;
        }
        let Some((labels, value)) = rest.rsplit_once("} ") else {
            continue;
        };
        let labels: BTreeMap<&str, &str> = labels
            .split(',')
            .filter_map(|label| {
                let (key, value) = label.split_once('=')?;
                Some((key, value.trim_matches('"')))
            })
            .collect();
        let label = |key: &str| labels.get(key).copied().unwrap_or_default();
        let (Ok(value), verb) = (value.trim().parse::<f64>(), label("verb")) else {
            continue;
        };
        if name == DISPATCHED {
            if FLOW_SCHEMAS.contains(&label("flow_schema")) {
                metrics.from_thuban += value;
            }
            continue;
        }
        let is_write = matches!(verb, "POST" | "PUT" | "PATCH" | "DELETE" | "APPLY");
        let is_ours = GROUPS.contains(&label("group"));
        if !is_write || !(is_ours || (name == BUCKETS && label("resource") == "pods")) {
            continue;
        }
        if name == BUCKETS {
            *metrics.buckets.entry(label("le").to_owned()).or_default() += value;
            continue;
        }
        let resource = match label("subresource") {
            "" => label("resource").to_owned(),
            subresource => format!("{}/{subresource}", label("resource")),
        };
        let request = Request {
            verb: verb.to_owned(),
            resource,
        };
        let requests = if label("code").starts_with('2') {
            &mut metrics.done
        } else {
            &mut metrics.refused
        };
        *requests.entry(request).or_default() += value;
    }
    metrics
}

impl Metrics {
    /// Returns the growth since then.
    pub fn since(&self, then: &Self) -> Self {
        let less = |now: &BTreeMap<Request, f64>, then: &BTreeMap<Request, f64>| {
            let change = |(request, count): (&Request, &f64)| {
                let change = count - then.get(request).copied().unwrap_or_default();
                (change > 0.0).then(|| (request.clone(), change))
            };
            now.iter().filter_map(change).collect()
        };
        let bucket = |(le, count): (&String, &f64)| {
            let old = then.buckets.get(le).copied().unwrap_or_default();
            (le.clone(), count - old)
        };
        Self {
            done: less(&self.done, &then.done),
            refused: less(&self.refused, &then.refused),
            from_thuban: self.from_thuban - then.from_thuban,
            buckets: self.buckets.iter().map(bucket).collect(),
        }
    }

    /// Returns the number of successful writes of resources that fit.
    pub fn writes(&self, fits: impl Fn(&Request) -> bool) -> f64 {
        self.done
            .iter()
            .filter(|(request, _)| fits(request))
            .map(|(_, count)| count)
            .sum()
    }

    /// Returns the milliseconds within which the API server answered that part of the writes; the value is the bound of
    /// a bucket.
    pub fn quantile_ms(&self, part: f64) -> Option<f64> {
        quantile_ms(self.buckets.iter().map(|(le, count)| (le.as_str(), *count)), part)
    }
}

/// Returns the milliseconds within which that part of all is, from the buckets of a histogram in seconds: each has its
/// bound as text, and how many are at most that long. The value is the bound of a bucket.
pub fn quantile_ms<'a>(buckets: impl Iterator<Item = (&'a str, f64)>, part: f64) -> Option<f64> {
    let read = |(le, count): (&str, f64)| Some((le.replace("+Inf", "inf").parse().ok()?, count));
    let mut bounds: Vec<(f64, f64)> = buckets.filter_map(read).collect();
    bounds.sort_by(|one, other| one.0.total_cmp(&other.0));
    let wanted = bounds.last()?.1 * part;
    let found = bounds
        .iter()
        .find(|(_, count)| *count >= wanted && wanted > 0.0)?;
    Some(found.0 * 1000.0)
}

impl Request {
    pub fn is(&self, resources: &[&str]) -> bool {
        resources.contains(&self.resource.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn writes_are_counted_by_resource_and_answer() {
        let text = |count: u32| {
            format!(
                "# HELP x\n\
                apiserver_request_total{{code=\"201\",component=\"apiserver\",dry_run=\"\",group=\"thuban.dev\",resource=\"endpoints\",scope=\"resource\",subresource=\"\",verb=\"POST\",version=\"v1alpha1\"}} {count}\n\
                apiserver_request_total{{code=\"409\",group=\"thuban.dev\",resource=\"endpoints\",subresource=\"status\",verb=\"PUT\"}} {count}\n\
                apiserver_request_total{{code=\"200\",group=\"thuban.dev\",resource=\"endpoints\",subresource=\"\",verb=\"LIST\"}} 9\n\
                apiserver_request_total{{code=\"200\",group=\"\",resource=\"pods\",subresource=\"\",verb=\"POST\"}} 9\n\
                apiserver_request_duration_seconds_bucket{{group=\"\",resource=\"pods\",verb=\"POST\",le=\"0.05\"}} {count}\n\
                apiserver_request_duration_seconds_bucket{{group=\"\",resource=\"pods\",verb=\"POST\",le=\"+Inf\"}} {}\n",
                2 * count
            )
        };
        let change = parse(&text(7)).since(&parse(&text(2)));
        let endpoints = change.writes(|request| request.is(&["endpoints"]));
        assert!((endpoints - 5.0).abs() < 0.1, "{endpoints}");
        let all = change.writes(|_| true);
        assert!((all - 5.0).abs() < 0.1, "{all}: no conflict, no pod, no list");
        assert_eq!(change.refused.len(), 1);
        assert_eq!(change.quantile_ms(0.5), Some(50.0));
        assert_eq!(change.quantile_ms(0.99), Some(f64::INFINITY));
    }

    #[test]
    fn requests_of_thuban_are_told_by_their_flow_schemas() {
        let text = |count: u32| {
            let line = |schema: &str| {
                format!(
                    "apiserver_flowcontrol_dispatched_requests_total{{flow_schema=\"{schema}\",priority_level=\"thuban\"}} {count}\n"
                )
            };
            ["thuban", "thuban-leases", "service-accounts", "exempt"]
                .map(line)
                .concat()
        };
        let change = parse(&text(7)).since(&parse(&text(2)));
        assert!((change.from_thuban - 10.0).abs() < 0.1, "{}", change.from_thuban);
        assert!(change.done.is_empty() && change.refused.is_empty());
    }
}
