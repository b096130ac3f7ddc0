use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use kube::client::Body;
use kube::runtime::reflector::store;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};
use thuban_api::proxies::{Pem, Proxies, Proxy, ProxyPort, ProxyTls};
use thuban_api::{ProxyProtocol, TlsVersion, Vip};
use tokio::sync::watch;

use super::{Certificates, NotRead, Sources, members, proxy};
use crate::driver::treatment_of;

fn service(treatment: &Value) -> Service {
    let service = json!({
        "metadata": {
            "name": "shop", "namespace": "red", "labels": {"thuban.dev/driver": "Haproxy"},
            "annotations": {"thuban.dev/haproxy": treatment.to_string()},
        },
        "spec": {"ipFamilies": ["IPv4", "IPv6"], "ports": [
            {"port": 443, "protocol": "TCP", "nodePort": 30443},
            {"port": 80, "protocol": "TCP"},
        ]},
    });
    serde_json::from_value(service).unwrap()
}

fn node(name: &str, address: &str) -> Arc<Node> {
    let node = json!({"metadata": {"name": name}, "status": {"addresses": [
        {"type": "Hostname", "address": name}, {"type": "InternalIP", "address": "2001:db8::9"},
        {"type": "InternalIP", "address": address},
    ]}});
    Arc::new(serde_json::from_value(node).unwrap())
}

fn slice(family: &str, endpoints: &Value) -> Arc<EndpointSlice> {
    let slice = json!({"metadata": {"name": "shop-1"}, "addressType": family, "endpoints": endpoints});
    Arc::new(serde_json::from_value(slice).unwrap())
}

fn endpoint(node: &str, ready: bool, serving: bool) -> Value {
    json!({"addresses": ["10.0.0.7"], "nodeName": node, "conditions": {"ready": ready, "serving": serving}})
}

#[test]
fn a_proxy_does_what_was_accepted() {
    let vip = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Vip", "metadata": {"name": "shop", "namespace": "red"},
        "spec": {"service": "web"}, "status": {"addresses": ["203.0.113.7"], "driver": "Haproxy"},
    });
    let vip: Vip = serde_json::from_value(vip).unwrap();
    let service = service(&json!({
        "sourceRanges": ["198.51.100.0/24"], "affinitySeconds": 60, "proxyProtocol": "V2",
        "clientLimits": {"perClient": 9}, "idleSeconds": 30,
    }));
    let made = proxy(&vip, &service, &treatment_of(&service).unwrap(), Vec::new());
    assert_eq!((made.namespace.as_str(), made.name.as_str()), ("red", "shop"));
    let port = ProxyPort {
        port: 443,
        node_port: 30443,
    };
    assert_eq!(made.ports, [port], "only those with a NodePort");
    assert_eq!(made.source_ranges, ["198.51.100.0/24"]);
    assert_eq!((made.affinity_seconds, made.idle_seconds), (Some(60), Some(30)));
    assert_eq!(made.proxy_protocol, Some(ProxyProtocol::V2));
    assert_eq!(made.client_limits.per_client, Some(9));
}

/// Returns a Vip that HAProxy serves, and the Service that lbaasd made for it.
fn served(name: &str, treatment: &Value) -> (Vip, Service) {
    let vip = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
        "metadata": {"name": name, "namespace": "red", "uid": name},
        "spec": {"service": "web"}, "status": {"addresses": ["203.0.113.7"], "driver": "Haproxy"},
    });
    let owner = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip", "name": name, "uid": name,
        "controller": true});
    let mut service = service(treatment);
    service.metadata.name = Some(name.to_owned());
    service.metadata.owner_references = Some(vec![serde_json::from_value(owner).unwrap()]);
    (serde_json::from_value(vip).unwrap(), service)
}

/// Returns sources with these Vips. No Secret is read.
fn sources(known: Vec<(Vip, Service)>) -> Sources {
    let (vips, mut vip_writer) = store();
    let (services, mut service_writer) = store();
    for (vip, service) in known {
        vip_writer.apply_watcher_event(&Event::Apply(vip));
        service_writer.apply_watcher_event(&Event::Apply(service));
    }
    let silent = tower::service_fn(|_: http::Request<Body>| {
        std::future::pending::<Result<http::Response<Body>, std::io::Error>>()
    });
    let changes = watch::Sender::new(0);
    Sources {
        vips,
        services,
        slices: store().0,
        nodes: store().0,
        certificates: Arc::new(Certificates::new(Client::new(silent, "default"), changes.clone())),
        changes: changes.subscribe(),
    }
}

#[tokio::test]
async fn a_secret_that_is_not_read_concerns_its_vip_alone() {
    let of_secret = json!({"ssl": {"secret": "shop-tls"}});
    let sources = sources(vec![
        served("clear", &json!({})),
        served("first", &of_secret),
        served("kept", &of_secret),
    ]);
    assert_eq!(sources.proxies(None), Err(NotRead), "nodes keep what they have");
    let pem = Pem::try_from("-----BEGIN CERTIFICATE-----\n".to_owned()).unwrap();
    let kept = Proxy {
        namespace: "red".to_owned(),
        name: "kept".to_owned(),
        tls: Some(ProxyTls {
            pem: pem.clone(),
            min_version: TlsVersion::V13,
        }),
        ..Proxy::default()
    };
    let former = Proxies {
        version: String::new(),
        proxies: vec![kept],
    };
    let told = sources.proxies(Some(&former)).unwrap().proxies;
    let has_pem = |proxy: &Proxy| proxy.tls.as_ref().map(|tls| tls.pem == pem);
    let served: Vec<_> = told
        .iter()
        .map(|proxy| (proxy.name.as_str(), has_pem(proxy)))
        .collect();
    assert_eq!(served, [("clear", None), ("kept", Some(true))]);
}

#[tokio::test]
async fn only_secrets_of_vips_with_addresses_are_read() {
    let of_secret = json!({"ssl": {"secret": "shop-tls"}});
    let (mut without, forged) = served("without", &of_secret);
    without.status = None;
    let sources = sources(vec![
        (without, forged),
        served("shop", &json!({"ssl": {"secret": "own"}})),
    ]);
    assert_eq!(sources.secrets(), [("red".to_owned(), "own".to_owned())].into());
}

#[test]
fn a_services_own_words_are_not_believed_without_label() {
    let mut unlabelled = service(&json!({}));
    assert!(treatment_of(&unlabelled).is_some());
    unlabelled.metadata.labels = None;
    assert_eq!(treatment_of(&unlabelled), None);
}

#[test]
fn members_are_nodes_with_as_much_weight_as_backends() {
    let nodes = [node("a", "192.0.2.1"), node("b", "192.0.2.2")];
    let of = |slices: &[Arc<EndpointSlice>]| {
        let members = members(&service(&json!({})), slices, &nodes);
        let member = |member: &thuban_api::proxies::ProxyMember| {
            (member.node.clone(), member.address.to_string(), member.weight)
        };
        members.iter().map(member).collect::<Vec<_>>()
    };
    let ready = |node| endpoint(node, true, true);
    let slices = [
        slice(
            "IPv4",
            &json!([
                ready("b"),
                ready("a"),
                ready("b"),
                endpoint("a", false, true),
                ready("lost")
            ]),
        ),
        slice("IPv6", &json!([ready("b"), ready("a"), ready("b")])),
    ];
    let a = ("a".to_owned(), "192.0.2.1".to_owned(), 1);
    let b = ("b".to_owned(), "192.0.2.2".to_owned(), 2);
    assert_eq!(of(&slices), [a.clone(), b]);
    let ending = slice(
        "IPv4",
        &json!([endpoint("a", false, true), endpoint("b", false, false)]),
    );
    assert_eq!(of(&[ending]), [a], "it serves while it ends");
    assert!(of(&[]).is_empty());
}
