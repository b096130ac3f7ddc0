//! Tests of the backends of Services that slices name.

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
fn nodes_serve_outside_backends_and_leave_members_out() {
    let place_of = |address: IpAddr, _: Option<&Target>| match address.to_string().as_str() {
        "172.16.0.1" | "172.16.0.2" => Some(Place::Outside),
        "10.0.1.2" => Some(Place::Member),
        _ => None,
    };
    let made = |addresses: &[&str]| {
        let endpoints = addresses.iter().map(|address| json!({"addresses": [address]}));
        let endpoints = Value::Array(endpoints.collect());
        let slices = [of_http(&endpoints)];
        backends(&http(), &http().cluster_ips(), &slices, place_of).unwrap()
    };
    let mixed = made(&["172.16.0.1", "10.0.1.2", "172.16.0.2", "192.0.2.9"]);
    assert!(mixed.by_node);
    assert_eq!(ways(&mixed), ["172.16.0.1:8080", "172.16.0.2:8080"]);
    assert_eq!((mixed.used, mixed.left_out), (2, 2));
    let within = made(&["10.0.1.2"]);
    assert!(!within.by_node);
    let many: Vec<String> = (0..1025_u32)
        .map(|host| std::net::Ipv4Addr::from_bits(0xac10_0100 + host).to_string())
        .collect();
    let endpoints: Vec<_> = many
        .iter()
        .map(|address| json!({"addresses": [address]}))
        .collect();
    let slices = [of_http(&Value::Array(endpoints))];
    let place_of = |_: IpAddr, _: Option<&Target>| Some(Place::Outside);
    let refused = backends(&http(), &http().cluster_ips(), &slices, place_of);
    assert_eq!(refused, Err(TooLarge::ByNode(1025)));
    assert_eq!(
        (ways(&within), within.left_out),
        (vec!["10.0.1.2:8080".to_owned()], 0)
    );
}

#[test]
fn nothing_leads_to_the_overlays_port_outside_of_the_vpc() {
    let ports = json!([
        {"name": "a", "protocol": "UDP", "port": 53, "nodePort": 6081},
        {"name": "b", "protocol": "TCP", "port": 54, "nodePort": 6081},
    ]);
    let mut service = service(&ports);
    let at = |port: u16| {
        let ports = json!([{"name": "a", "protocol": "UDP", "port": port}, {"name": "b", "protocol": "TCP", "port": port}]);
        [slice(&ports, &json!([{"addresses": ["172.16.0.1"]}]))]
    };
    let made = |service: &Service, port, place| {
        let place_of = move |_: IpAddr, _: Option<&Target>| Some(place);
        backends(service, &service.cluster_ips(), &at(port), place_of).unwrap()
    };
    let by_port = |made: &Backends| {
        first(made)
            .into_iter()
            .map(|(_, _, ways)| ways.len())
            .collect::<Vec<_>>()
    };
    let refused = made(&service, 6081, Place::Outside);
    assert_eq!(
        (by_port(&refused), refused.by_node),
        (vec![0, 1], true),
        "TCP alone"
    );
    assert!(refused.uses_overlay_port);
    // Within a VPC the port is like any other.
    let within = made(&service, 6081, Place::Member);
    assert_eq!(by_port(&within), [1, 1]);
    service.spec.as_mut().unwrap().kind = Some("NodePort".into());
    let node_ports = |made: &Backends| {
        let ports = made.exposed[0].1.iter();
        ports
            .map(|port| port.node_port.unwrap_or_default())
            .collect::<Vec<_>>()
    };
    let exposed = made(&service, 8080, Place::Member);
    assert_eq!(
        (node_ports(&exposed), exposed.uses_overlay_port),
        (vec![0, 6081], true)
    );
    service.spec.as_mut().unwrap().ports.as_mut().unwrap()[0].node_port = Some(30053);
    let other = made(&service, 8080, Place::Outside);
    assert_eq!((by_port(&other), other.uses_overlay_port), (vec![1, 1], false));
    // A backend that isn't ready now will be soon, and a port that the Service doesn't have belongs to nobody.
    let unready = json!([{"addresses": ["172.16.0.1"], "conditions": {"ready": false}}]);
    for (name, is_told) in [("a", true), ("c", false)] {
        let slices = [slice(
            &json!([{"name": name, "protocol": "UDP", "port": 6081}]),
            &unready,
        )];
        let outside = |_: IpAddr, _: Option<&Target>| Some(Place::Outside);
        let made = backends(&service, &service.cluster_ips(), &slices, outside).unwrap();
        assert_eq!(made.uses_overlay_port, is_told, "port {name}");
    }
}

#[test]
fn nodes_expose_service_ports_except_the_overlay_port() {
    let service = service(&json!([
        {"name": "a", "protocol": "UDP", "port": 6081}, {"name": "b", "protocol": "TCP", "port": 443},
    ]));
    let ports = json!([{"name": "a", "protocol": "UDP", "port": 5000}, {"name": "b", "protocol": "TCP", "port": 5000}]);
    let slices = [slice(&ports, &json!([{"addresses": ["10.0.1.2"]}]))];
    let outside = ["172.16.0.9".parse().unwrap()];
    let made = |at_droplets, place| {
        let locate = |_: IpAddr, _: &Backend| Some(Located { place, droplet: None });
        let ways_in = WaysIn {
            outside: &outside,
            at_droplets,
            ..WaysIn::default()
        };
        super::backends(&service, &service.cluster_ips(), ways_in, &slices, locate).unwrap()
    };
    let exposed = |made: &Backends| made.exposed[0].1.iter().map(|port| port.port).collect::<Vec<_>>();
    let elsewhere = made(false, Place::Member);
    assert_eq!(
        (exposed(&elsewhere), elsewhere.uses_overlay_port),
        (vec![6081, 443], false)
    );
    let at_droplets = made(true, Place::Member);
    assert_eq!(
        (exposed(&at_droplets), at_droplets.uses_overlay_port),
        (vec![443], true)
    );
    // Agents drop packets of pods to it.
    assert!(made(false, Place::Outside).uses_overlay_port);
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
fn nodes_choose_for_clients_that_keep_backends_anywhere() {
    let many = |count: u32| {
        let each =
            (0..count).map(|number| json!({"addresses": [format!("10.0.{}.{}", number >> 8, number & 255)]}));
        [of_http(&Value::Array(each.collect()))]
    };
    let exposed = |asked: &Value, slices: &[EndpointSlice]| {
        let mut value = serde_json::to_value(http()).unwrap();
        for (field, asked) in asked.as_object().unwrap() {
            value["spec"][field] = asked.clone();
        }
        let service: Service = serde_json::from_value(value).unwrap();
        let made = made(&service, slices);
        let port = &made.exposed[0].1[0];
        (port.affinity, port.members.len(), port.local.is_some())
    };
    let asked = json!({"type": "NodePort", "sessionAffinity": "ClientIP"});
    assert_eq!(exposed(&asked, &many(3)), (10_800, 3, false));
    assert_eq!(exposed(&asked, &many(1024)), (10_800, 1024, false));
    assert_eq!(
        exposed(&asked, &many(1025)),
        (10_800, 0, false),
        "too many for a node"
    );
    assert_eq!(exposed(&json!({"type": "NodePort"}), &many(3)), (0, 0, false));
    let mut local = asked;
    local["externalTrafficPolicy"] = "Local".into();
    assert_eq!(exposed(&local, &many(3)), (10_800, 0, true));
    let http: Service = {
        let mut value = serde_json::to_value(http()).unwrap();
        value["spec"]["type"] = "NodePort".into();
        value["spec"]["sessionAffinity"] = "ClientIP".into();
        serde_json::from_value(value).unwrap()
    };
    let outside = backends(&http, &http.cluster_ips(), &many(3), |_, _| Some(Place::Outside)).unwrap();
    assert!(outside.exposed[0].1[0].members.is_empty(), "nodes know them");
    assert_eq!(of_tenant(&http, &many(3)).exposed[0].1[0].affinity, 10_800);
    // One that ends is used only if there is no other.
    let ending = json!({"addresses": ["10.0.1.9"], "conditions": {"ready": false, "serving": true}});
    let both = of_http(&json!([{"addresses": ["10.0.1.2"]}, ending]));
    assert_eq!(made(&http, &[both]).exposed[0].1[0].members.len(), 1);
}

#[test]
fn traffic_that_stays_on_its_node_has_the_best_backends_of_each() {
    let with = |fields: &Value| {
        let mut value = serde_json::to_value(http()).unwrap();
        for (field, asked) in fields.as_object().unwrap() {
            value["spec"][field] = asked.clone();
        }
        serde_json::from_value::<Service>(value).unwrap()
    };
    let on = |node: &str, host: u8, ready: bool| {
        json!({"addresses": [format!("10.0.1.{host}")], "nodeName": node,
               "conditions": {"ready": ready, "serving": true, "terminating": !ready}})
    };
    let nowhere = json!({"addresses": ["10.0.1.9"]});
    // No backend on node b is ready: those that end still serve.
    let slices = [of_http(&json!([
        on("a", 2, true),
        on("a", 3, false),
        on("b", 4, false),
        nowhere
    ]))];
    let cluster = made(&with(&json!({})), &slices);
    assert_eq!(ways(&cluster), ["10.0.1.2:8080", "10.0.1.9:8080"]);
    assert!(cluster.homes.is_empty() && !cluster.tables[0].1[0].local);
    let internal = made(&with(&json!({"internalTrafficPolicy": "Local"})), &slices);
    assert_eq!(ways(&internal), ["10.0.1.2:8080", "10.0.1.4:8080"]);
    assert!(internal.tables[0].1[0].local && internal.exposed.is_empty());
    assert_eq!(internal.homes[&"10.0.1.4".parse::<IpAddr>().unwrap()], "b");
    // Without any backend new connections are refused everywhere.
    let none = made(&with(&json!({"internalTrafficPolicy": "Local"})), &[]);
    assert!(!none.tables[0].1[0].local);
    let outside = json!({"type": "NodePort", "externalTrafficPolicy": "Local",
                         "ports": [{"name": "http", "port": 80, "nodePort": 30080}]});
    let outside = made(&with(&outside), &slices);
    assert_eq!(ways(&outside), ways(&cluster), "pods reach all");
    let port = &outside.exposed[0].1[0];
    assert_eq!(port.node_port, Some(30080));
    let local = &internal.tables[0].1[0].backends;
    assert_eq!(port.local.as_ref(), Some(local));
    assert_eq!(port.ending, [local.last().unwrap().address].into());
    assert!(outside.by_peers, "for processes of nodes without a backend");
    let open = json!({"type": "NodePort", "ports": [{"name": "http", "port": 80, "nodePort": 30080}]});
    let open = with(&open);
    let tenants = of_tenant(&open, &slices);
    let open = made(&open, &slices);
    assert!(open.exposed[0].1[0].local.is_none() && !open.by_peers);
    // Of another VPC's Service each node is told its own backends.
    let port = &tenants.exposed[0].1[0];
    assert!(tenants.by_peers && !tenants.tables[0].1[0].local);
    assert_eq!(port.local.as_ref(), Some(local));
    assert_eq!(port.ending, [local.last().unwrap().address].into());
    assert_eq!(ways(&tenants), ways(&open));
    // If a node has very many backends, the first ones of each port are used: the Service is served all the same.
    let crowd = (0..1100).map(|number: u16| {
        let [high, low] = number.to_be_bytes();
        json!({"addresses": [format!("10.0.{}.{low}", 8 + high)], "nodeName": "a"})
    });
    let crowd: Vec<_> = crowd.collect();
    let ports = [("http", 80), ("more", 81)]
        .map(|(name, port)| json!({"name": name, "port": port, "nodePort": 30000 + port}));
    let wide = with(&json!({"type": "NodePort", "ports": ports}));
    let ports = json!([{"name": "http", "protocol": "TCP", "port": 8080}, {"name": "more", "protocol": "TCP", "port": 81}]);
    let crowd = of_tenant(&wide, &[slice(&ports, &json!(crowd))]);
    for port in 0..2 {
        assert_eq!(crowd.exposed[0].1[port].local.as_ref().unwrap().len(), 512);
        assert_eq!(crowd.tables[0].1[port].backends.len(), 1100);
    }
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

#[test]
fn a_front_has_all_backends_unless_traffic_stays_on_its_node() {
    let front: IpAddr = "203.0.113.1".parse().unwrap();
    let fronted = |status: &str, policy: &str| -> Service {
        serde_json::from_value(json!({
            "metadata": {"name": "web"},
            "spec": {"type": "LoadBalancer", "clusterIPs": ["10.96.0.10"], "externalTrafficPolicy": policy,
                "internalTrafficPolicy": "Local",
                "ports": [{"name": "http", "port": 80, "nodePort": 30080}]},
            "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1", "ipMode": "VIP"}]},
                "conditions": [{"type": "thuban.dev/Front", "status": status, "reason": "Dsr", "message": "",
                    "lastTransitionTime": "2026-11-27T00:00:00Z"}]},
        }))
        .unwrap()
    };
    let slices = [of_http(&json!([
        {"addresses": ["10.0.1.2"], "nodeName": "a"}, {"addresses": ["10.0.1.3"], "nodeName": "b"},
        {"addresses": ["10.0.1.4"], "nodeName": "b", "conditions": {"ready": false}},
    ]))];
    let made = |service: &Service, place: Place, at_droplets| {
        let locate = |_: IpAddr, backend: &Backend| {
            let droplet = backend.node_name.clone();
            Some(Located { place, droplet })
        };
        let fronts = service.fronts();
        let ways_in = WaysIn {
            outside: &service.balancers(),
            fronts: &fronts,
            at_droplets,
            is_tenants: true,
        };
        super::backends(service, &service.cluster_ips(), ways_in, &slices, locate).unwrap()
    };
    let service = fronted("True", "Cluster");
    let usual = made(&service, Place::Member, false);
    let [(address, ports)] = &usual.fronts[..] else {
        panic!("{:?}", usual.fronts)
    };
    assert_eq!(
        (*address, ports.len(), ports[0].port, ports[0].local),
        (front, 1, 80, false)
    );
    let backends: Vec<String> = ports[0]
        .backends
        .iter()
        .map(|backend| backend.address.to_string())
        .collect();
    assert_eq!(backends, ["10.0.1.2", "10.0.1.3"]);
    assert_eq!(usual.homes.len(), 2, "of the ready ones");
    assert!(
        !usual.exposed.is_empty(),
        "the node's own processes go by its stack"
    );
    for (service, place, at_droplets) in [
        (fronted("False", "Cluster"), Place::Member, false),
        (fronted("True", "Local"), Place::Member, false),
        (fronted("True", "Cluster"), Place::Outside, false),
        (fronted("True", "Cluster"), Place::Member, true),
    ] {
        assert_eq!(made(&service, place, at_droplets).fronts, []);
    }
}
