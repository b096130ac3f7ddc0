//! The metrics and probes of operator and transitd.

use crate::scrape::{
    assert_well_formed, http, https, metrics, of_node, page, page_of_node, reader, replicas,
};
use crate::support::{REACHED, get};
use crate::tenants::tenants;

#[test]
fn one_replica_leads_and_counts_what_it_does() {
    let cluster = &tenants().cluster;
    let replicas = replicas(cluster);
    assert_eq!(replicas.len(), 2);
    let all: Vec<_> = replicas
        .iter()
        .map(|address| metrics(cluster, address).unwrap())
        .collect();
    let leaders: Vec<_> = all
        .iter()
        .filter(|series| series["thuban_operator_leader"] > 0.0)
        .collect();
    assert_eq!(leaders.len(), 1, "{all:#?}");
    let leader = leaders[0];
    let value = |name: &str| {
        leader
            .get(&format!("thuban_operator_{name}"))
            .copied()
            .unwrap_or(-1.0)
    };
    assert!(value(r#"droplets{state="connected"}"#) >= 3.0, "{leader:#?}");
    assert!(value(r#"droplets{state="suspect"}"#).abs() < 0.1, "{leader:#?}");
    let pods = f64::from(u32::try_from(tenants().pods.len()).unwrap());
    assert!(
        value(r#"objects{kind="Endpoint",phase="Provisioned"}"#) >= pods,
        "{leader:#?}"
    );
    assert!(
        value(r#"objects{kind="Vpc",phase="Provisioned"}"#) >= 4.0,
        "{leader:#?}"
    );
    for series in [
        "epoch",
        r#"reconciles_total{kind="Endpoint",result="ok",reason=""}"#,
        r#"reconcile_duration_seconds_count{kind="Droplet"}"#,
        r#"rows_sent_total{change="upsert"}"#,
        "snapshots_sent_total",
        "ack_duration_seconds_count",
    ] {
        assert!(value(series) > 0.0, "{series}: {leader:#?}");
    }
    // There may be no policy at this moment.
    for series in [
        r#"policies{condition="Accepted",status="True"}"#,
        r#"policies{condition="Provisioned",status="Unknown"}"#,
        "policy_compile_duration_seconds_count",
        "policy_provisioned_duration_seconds_count",
    ] {
        assert!(value(series) >= 0.0, "{series}: {leader:#?}");
    }
    let names: Vec<String> = tenants().pods.iter().map(|pod| pod.name.clone()).collect();
    for series in leader.keys() {
        assert!(
            !names.iter().any(|name| series.contains(name.as_str())),
            "{series}"
        );
        assert!(!series.contains("red"), "{series} names a tenant");
    }
}

#[test]
fn leader_and_standby_are_ready_and_alive() {
    let cluster = &tenants().cluster;
    for address in replicas(cluster) {
        for path in ["/readyz", "/healthz"] {
            let answer = http(&address, path).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{address}{path}: {answer}");
        }
    }
}

#[test]
fn metrics_of_the_operator_are_shown_by_right() {
    let cluster = &tenants().cluster;
    let stranger = cluster
        .kubectl(&["create", "token", "-n", "red", "default"])
        .unwrap();
    let elsewhere = cluster
        .kubectl(&["create", "token", "-n", "red", "default", "--audience=elsewhere"])
        .unwrap();
    for address in replicas(cluster) {
        for (token, status) in [
            (None, 401),
            (Some("stranger"), 401),
            (Some(elsewhere.trim()), 401),
            (Some(stranger.trim()), 403),
            (Some(reader(cluster).unwrap()), 200),
        ] {
            let answer = https(cluster, &address, "/metrics", token).unwrap();
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status} ")),
                "{status}: {answer}"
            );
            assert_eq!(answer.contains("thuban_operator_"), status == 200, "{answer}");
        }
        let answer = http(&address, "/metrics").unwrap();
        assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    }
}

/// The Prometheus operator verifies the pages by the ConfigMap; these tests do by the Lease.
#[test]
fn what_verifies_the_operator_is_in_a_config_map() {
    let cluster = &tenants().cluster;
    let read = |kind: &str, name: &str| get(cluster, &[kind, "-n", "thuban-system", name]).unwrap();
    let lease = read("lease", "thuban-operator");
    let published = read("configmap", "thuban-operator-ca");
    assert_eq!(
        published["data"]["ca.crt"],
        lease["metadata"]["annotations"]["thuban.dev/ca-bundle"]
    );
    let data = published["data"].as_object().unwrap();
    assert_eq!(data.len(), 1, "nothing else");
}

#[test]
fn transitd_of_each_node_counts_what_it_has() {
    let cluster = &tenants().cluster;
    for (pod, address) in tenants().ring("red-web") {
        pod.ping(address, REACHED).unwrap();
    }
    for node in cluster.nodes().unwrap() {
        let seen = of_node(cluster, &node).unwrap();
        let value = |name: &str| {
            seen.get(&format!("thuban_transitd_{name}"))
                .copied()
                .unwrap_or(-1.0)
        };
        let own = tenants().pods.iter().filter(|pod| pod.node == node).count();
        let own = f64::from(u32::try_from(own).unwrap());
        assert!(value("attachments") >= own, "{node}: {seen:#?}");
        assert!(
            value(r#"rows{table="LOCAL_ENDPOINTS"}"#) >= own,
            "{node}: {seen:#?}"
        );
        for series in ["stream", "ready", "attachments_without_agent"] {
            let wanted = if series == "attachments_without_agent" {
                0.0
            } else {
                1.0
            };
            assert!(
                (value(series) - wanted).abs() < 0.1,
                "{node}: {series}: {seen:#?}"
            );
        }
        for series in [
            "epoch",
            r#"packets_total{reason="delivered"}"#,
            r#"cni_total{verb="ADD",code="0"}"#,
            "snapshots_total",
        ] {
            assert!(value(series) > 0.0, "{node}: {series}: {seen:#?}");
        }
        let names = || {
            tenants()
                .pods
                .iter()
                .map(|pod| pod.name.as_str())
                .chain(["red-web", "blue"])
        };
        let is_named = |series: &String| names().any(|name| series.contains(name));
        assert!(!seen.keys().any(is_named), "{node}: a tenant is named: {seen:#?}");
    }
}

/// Prometheus' own tool has no objection to names, types and help of the pages.
#[test]
fn promtool_finds_no_fault_with_pages() {
    let cluster = &tenants().cluster;
    let mut pages = vec![("transitd", page_of_node(cluster, "node-a").unwrap())];
    for address in replicas(cluster) {
        pages.push(("operator", page(cluster, &address).unwrap()));
    }
    for (whose, answer) in pages {
        assert_well_formed(whose, &answer);
    }
}
