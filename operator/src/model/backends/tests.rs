//! Tests of the backends of Services that slices name.

mod nodes;

use std::net::IpAddr;

use super::super::service::Target;
use super::super::world::Hints;
use super::{Backend, Backends, EndpointSlice, Located, Place, Service, TooLarge, WaysIn};
use serde_json::{Value, json};

/// Makes the backends of a Service; each backend is where its slice says.
fn backends(
    service: &Service,
    addresses: &[IpAddr],
    slices: &[EndpointSlice],
    place_of: impl Fn(IpAddr, Option<&Target>) -> Option<Place>,
) -> Result<Backends, TooLarge> {
    let locate = |address: IpAddr, backend: &Backend| {
        let place = place_of(address, backend.target_ref.as_ref())?;
        let droplet = backend.node_name.clone();
        Some(Located { place, droplet })
    };
    super::backends(service, addresses, WaysIn::default(), slices, locate)
}

/// Makes the backends of a Service in a VPC without nodes.
fn of_tenant(service: &Service, slices: &[EndpointSlice]) -> Backends {
    let locate = |_: IpAddr, backend: &Backend| {
        Some(Located {
            place: Place::Member,
            droplet: backend.node_name.clone(),
        })
    };
    let ways_in = WaysIn {
        is_tenants: true,
        ..WaysIn::default()
    };
    super::backends(service, &service.cluster_ips(), ways_in, slices, locate).unwrap()
}

fn service(ports: &Value) -> Service {
    let spec = json!({"type": "ClusterIP", "clusterIPs": ["10.96.0.10"], "ports": ports});
    serde_json::from_value(json!({"metadata": {"name": "web"}, "spec": spec})).unwrap()
}

fn http() -> Service {
    service(&json!([{"name": "http", "protocol": "TCP", "port": 80, "targetPort": "web"}]))
}

fn slice(ports: &Value, endpoints: &Value) -> EndpointSlice {
    let slice = json!({"metadata": {}, "addressType": "IPv4", "ports": ports, "endpoints": endpoints});
    serde_json::from_value(slice).unwrap()
}

/// Returns a slice with these endpoints on port 8080 of `http`.
fn of_http(endpoints: &Value) -> EndpointSlice {
    slice(
        &json!([{"name": "http", "protocol": "TCP", "port": 8080}]),
        endpoints,
    )
}

fn made(service: &Service, slices: &[EndpointSlice]) -> Backends {
    backends(service, &service.cluster_ips(), slices, |_, _| {
        Some(Place::Member)
    })
    .unwrap()
}

/// Returns (protocol, port, its backends) of the service's first address.
fn first(backends: &Backends) -> Vec<(u8, u16, Vec<String>)> {
    let ports = &backends.tables[0].1;
    ports
        .iter()
        .map(|port| {
            let ways = port
                .backends
                .iter()
                .map(|backend| format!("{}:{}", backend.address, backend.port));
            (port.protocol, port.port, ways.collect())
        })
        .collect()
}

fn ways(backends: &Backends) -> Vec<String> {
    first(backends).remove(0).2
}

#[test]
fn slices_are_joined_by_the_names_and_protocols_of_ports() {
    let service = service(&json!([
        {"name": "http", "port": 80}, {"name": "dns", "protocol": "UDP", "port": 53},
        {"name": "dns-tcp", "protocol": "TCP", "port": 53},
    ]));
    let ports = json!([{"name": "http", "port": 8080}, {"name": "dns", "protocol": "UDP", "port": 5353}]);
    let slices = [
        slice(&ports, &json!([{"addresses": ["10.0.1.2"]}])),
        // The pods of another version listen on another port.
        slice(
            &json!([{"name": "http", "protocol": "TCP", "port": 9090}, {"name": "dns", "protocol": "TCP", "port": 1}]),
            &json!([{"addresses": ["10.0.1.3"]}, {"addresses": ["10.0.1.4"]}]),
        ),
        slice(&json!([]), &json!([{"addresses": ["10.0.1.9"]}])),
        slice(&json!([{"name": "http"}]), &json!([{"addresses": ["10.0.1.9"]}])),
    ];
    let made = made(&service, &slices);
    let text = |ways: &[&str]| ways.iter().map(|way| (*way).to_owned()).collect::<Vec<_>>();
    assert_eq!(
        first(&made),
        [
            (6, 80, text(&["10.0.1.2:8080", "10.0.1.3:9090", "10.0.1.4:9090"])),
            (17, 53, text(&["10.0.1.2:5353"])),
            (6, 53, text(&[])),
        ]
    );
    assert_eq!((made.used, made.left_out), (3, 0));
    let mut reversed = slices;
    reversed.reverse();
    assert_eq!(super::tests::made(&service, &reversed), made, "in any order");
}

#[test]
fn ready_backends_are_used_else_those_still_serving() {
    let endpoint = |host: u8, ready: bool, serving: bool, terminating: bool| {
        json!({"addresses": [format!("10.0.1.{host}")],
               "conditions": {"ready": ready, "serving": serving, "terminating": terminating}})
    };
    let [starting, ending, ended] = [
        endpoint(2, false, false, false),
        endpoint(3, false, true, true),
        endpoint(4, false, false, true),
    ];
    let ready = endpoint(5, true, true, false);
    let of = |endpoints: &Value| ways(&made(&http(), &[of_http(endpoints)]));
    assert_eq!(of(&json!([starting, ending, ended, ready])), ["10.0.1.5:8080"]);
    assert_eq!(of(&json!([starting, ending, ended])), ["10.0.1.3:8080"]);
    assert_eq!(of(&json!([starting, ended])), Vec::<String>::new());
    // Serving alone is not enough: a backend that is not ready and does not end is left out.
    assert_eq!(
        of(&json!([endpoint(6, false, true, false)])),
        Vec::<String>::new()
    );
    // A missing condition counts as good.
    let unsaid = json!([{"addresses": ["10.0.1.7"]}, {"addresses": ["10.0.1.8"], "conditions": {}}]);
    assert_eq!(of(&unsaid), ["10.0.1.7:8080", "10.0.1.8:8080"]);
    // publishNotReadyAddresses: slices say ready although it ends.
    assert_eq!(of(&json!([endpoint(9, true, false, true)])), ["10.0.1.9:8080"]);
}

#[test]
fn backend_in_two_slices_counts_once_with_better_state() {
    let ending = json!([{"addresses": ["10.0.1.2"],
                         "conditions": {"ready": false, "serving": true, "terminating": true}}]);
    let ready = json!([{"addresses": ["10.0.1.2"]}]);
    let made = made(&http(), &[of_http(&ready), of_http(&ending)]);
    assert_eq!(ways(&made), ["10.0.1.2:8080"]);
    assert_eq!(made.used, 1);
}

#[test]
fn each_family_has_its_own_backends_and_falls_back_by_itself() {
    let mut dual = http();
    dual.spec.as_mut().unwrap().cluster_ips = Some(vec!["10.96.0.10".into(), "fd00:96::10".into()]);
    let ending = json!([{"addresses": ["fd00:1::2"],
                         "conditions": {"ready": false, "serving": true, "terminating": true}}]);
    let slices = [of_http(&json!([{"addresses": ["10.0.1.2"]}])), of_http(&ending)];
    let made = made(&dual, &slices);
    let addresses: Vec<String> = made
        .tables
        .iter()
        .map(|(address, _)| address.to_string())
        .collect();
    assert_eq!(addresses, ["10.96.0.10", "fd00:96::10"]);
    let backend = |table: usize| made.tables[table].1[0].backends.first().unwrap().address;
    let parsed = |text: &str| text.parse::<IpAddr>().unwrap();
    assert_eq!(
        (backend(0), backend(1)),
        (parsed("10.0.1.2"), parsed("fd00:1::2"))
    );
    assert!(made.tables.iter().all(|(_, ports)| ports[0].backends.len() == 1));
}

#[test]
fn only_members_of_the_vpc_count_and_the_others_are_counted() {
    let endpoints = json!([
        {"addresses": ["10.0.1.2"], "targetRef": {"kind": "Pod", "name": "a", "namespace": "red", "uid": "1"}},
        {"addresses": ["10.0.1.3"], "targetRef": {"kind": "Pod", "name": "b", "namespace": "red", "uid": "2"}},
        {"addresses": ["192.0.2.1"]},
        {"addresses": ["192.0.2.1"]},
        {"addresses": ["192.0.2.2"], "conditions": {"ready": false}},
    ]);
    let made = backends(
        &http(),
        &http().cluster_ips(),
        &[of_http(&endpoints)],
        |_, target| target?.may_be("red", "a", "1").then_some(Place::Member),
    )
    .unwrap();
    assert_eq!(ways(&made), ["10.0.1.2:8080"]);
    assert_eq!((made.used, made.left_out), (1, 2), "of those that are ready");
}

#[test]
fn a_target_that_names_another_pod_or_no_pod_is_none() {
    let target = |value: Value| serde_json::from_value::<Target>(value).unwrap();
    let pod = json!({"kind": "Pod", "namespace": "red", "name": "a", "uid": "1"});
    assert!(target(pod.clone()).may_be("red", "a", "1"));
    assert!(target(json!({})).may_be("red", "a", "1"));
    for (field, other) in [
        ("kind", "Node"),
        ("namespace", "blue"),
        ("name", "b"),
        ("uid", "2"),
    ] {
        let mut pod = pod.clone();
        pod[field] = other.into();
        assert!(!target(pod).may_be("red", "a", "1"), "{field}");
    }
}

#[test]
fn clients_stay_with_their_backend_for_as_long_as_is_asked_for() {
    let seconds = |affinity: &Value| {
        let mut value = serde_json::to_value(http()).unwrap();
        for (field, asked) in affinity.as_object().unwrap() {
            value["spec"][field] = asked.clone();
        }
        let service: Service = serde_json::from_value(value).unwrap();
        made(&service, &[]).tables[0].1[0].affinity
    };
    assert_eq!(seconds(&json!({})), 0);
    assert_eq!(seconds(&json!({"sessionAffinity": "None"})), 0);
    assert_eq!(seconds(&json!({"sessionAffinity": "ClientIP"})), 10_800);
    let config = json!({"clientIP": {"timeoutSeconds": 60}});
    let asked = json!({"sessionAffinity": "ClientIP", "sessionAffinityConfig": config});
    assert_eq!(seconds(&asked), 60);
}

#[test]
fn what_is_too_large_says_so_and_makes_no_table() {
    let ports: Vec<Value> = (1..=129)
        .map(|port| json!({"name": format!("p{port}"), "port": port}))
        .collect();
    let many = service(&json!(ports));
    assert_eq!(
        backends(&many, &many.cluster_ips(), &[], |_, _| Some(Place::Member)),
        Err(TooLarge::Ports(129))
    );
    let fit = service(&json!(ports[..128]));
    assert_eq!(made(&fit, &[]).tables[0].1.len(), 128);
    let endpoints = |count: u32| -> Vec<Value> {
        (0..count)
            .map(|host| json!({"addresses": [std::net::Ipv4Addr::from(0x0a00_0000 + host).to_string()]}))
            .collect()
    };
    let full = [
        of_http(&json!(endpoints(16_384)[..8000])),
        of_http(&json!(endpoints(16_384)[8000..])),
    ];
    assert_eq!(ways(&made(&http(), &full)).len(), 16_384);
    let over = [of_http(&json!(endpoints(16_385)))];
    let verdict = backends(&http(), &http().cluster_ips(), &over, |_, _| Some(Place::Member));
    assert_eq!(
        verdict,
        Err(TooLarge::Backends {
            port: 80,
            backends: 16_385
        })
    );
    // Ports that the slice's author chose, each with a backend.
    let named: Vec<Value> = (0..9)
        .map(|number| json!({"name": format!("p{number}"), "port": 80 + number}))
        .collect();
    let open: Vec<Value> = (0..9)
        .map(|number| json!({"name": format!("p{number}"), "port": 8080}))
        .collect();
    let wide = service(&json!(named));
    let slices = [slice(&json!(open), &json!(endpoints(8000)))];
    let verdict = backends(&wide, &wide.cluster_ips(), &slices, |_, _| Some(Place::Member));
    assert_eq!(verdict, Err(TooLarge::Ways(72_000)));
}

#[test]
fn services_without_an_address_of_their_own_have_no_table() {
    for spec in [
        json!({"clusterIPs": ["None"], "ports": [{"port": 80}]}),
        json!({"type": "ExternalName", "externalName": "example.org"}),
        json!({"type": "ExternalName", "clusterIPs": ["10.96.0.10"]}),
        json!({"ports": [{"port": 80}]}),
    ] {
        let service: Service = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
        assert!(made(&service, &[]).tables.is_empty(), "{spec}");
    }
    let spec =
        json!({"type": "NodePort", "clusterIPs": ["10.96.0.10"], "ports": [{"port": 80, "nodePort": 30080}]});
    let service: Service = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
    assert_eq!(made(&service, &[]).tables.len(), 1);
}

#[test]
fn hints_of_ready_backends_count_unless_traffic_stays() {
    let hints = json!({"forZones": [{"name": "x"}], "forNodes": [{"name": "a"}]});
    let slices = [of_http(&json!([
        {"addresses": ["10.0.1.1"], "hints": hints},
        {"addresses": ["10.0.1.2"], "hints": hints, "conditions": {"ready": false, "serving": true, "terminating": true}},
        {"addresses": ["10.0.1.3"], "hints": {}},
    ]))];
    let mut http = http();
    let made = of_tenant(&http, &slices);
    let expected = Hints {
        zones: ["x".to_owned()].into(),
        nodes: ["a".to_owned()].into(),
    };
    let address: IpAddr = [10, 0, 1, 1].into();
    assert_eq!(made.hints, [(address, expected)].into());
    http.spec.as_mut().unwrap().internal_traffic_policy = Some("Local".into());
    assert!(of_tenant(&http, &slices).hints.is_empty());
}
