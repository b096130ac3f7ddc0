//! Checks of this droplet's backends of load balancers: the node reaches its pods, and the operator is told of changes.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::row::Row;
use thuban_proto::transit::{
    CheckFailure, CheckState, Checked, FrontBackend, FrontPort, FrontRow, HealthCheck,
};
use thuban_testkit::wait::uninterrupted;

use crate::rig::{NODE, Rig, base_rows, in_namespace, local, mapped};

const FRONT: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
/// The last byte of the pod's address, and of one that a pod of another droplet has.
const POD: u8 = 5;
const ELSEWHERE: u8 = 6;
const PORT: u16 = 8080;

/// Returns a front with two backends, of which one is here.
fn front(check: Option<HealthCheck>) -> Row {
    let backend = |last: u8, droplet: [u8; 4]| FrontBackend {
        address: mapped(last),
        port: PORT.into(),
        droplet: droplet.to_vec(),
    };
    Row::Front(FrontRow {
        vni: 7,
        address: FRONT.to_ipv6_mapped().octets().to_vec(),
        ports: vec![FrontPort {
            protocol: 6,
            port: 80,
            backends: vec![backend(POD, NODE), backend(ELSEWHERE, [192, 0, 2, 2])],
            ..FrontPort::default()
        }],
        check,
        ..FrontRow::default()
    })
}

fn by_tcp() -> HealthCheck {
    HealthCheck {
        port: PORT.into(),
        path: String::new(),
        interval_ms: 1000,
        rise: 1,
        fall: 1,
    }
}

/// Runs a server in the pod that answers each request with a line that is not HTTP.
fn serve(rig: &Rig) {
    let listener = in_namespace(&format!("{}-p1", rig.name), || {
        TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap()
    });
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            // A check by TCP ends its connection at once.
            if uninterrupted(|| stream.read(&mut [0; 1024])).is_ok_and(|length| length > 0) {
                let _ = stream.write_all(b"hello\r\n");
            }
        }
    });
}

/// Returns what the droplet has reported since its operator forgot what it received.
fn reported(rig: &Rig) -> Vec<Checked> {
    let shared = rig.operator.shared.lock().unwrap();
    let received = shared.received.iter();
    let checks = received.filter_map(|message| match message {
        Message::Checks(checks) => Some(checks.checked.clone()),
        _ => None,
    });
    checks.flatten().collect()
}

/// Waits until the droplet has told a state of its backend, for this reason.
fn wait_for(rig: &Rig, state: CheckState, failure: CheckFailure) {
    let is_it = |checked: &Checked| (checked.state(), checked.failure()) == (state, failure);
    rig.operator.wait_for(
        "the state of the backend",
        |message| matches!(message, Message::Checks(checks) if checks.checked.iter().any(is_it)),
    );
    let own = |checked: &Checked| checked.vni == 7 && checked.backend == mapped(POD);
    assert!(reported(rig).iter().all(own), "another droplet checks the other");
    rig.operator.forget_received();
}

#[test]
fn a_backend_is_checked_on_its_own_node() {
    let mut rows = base_rows();
    rows.extend([local(7, "p1", POD), front(Some(by_tcp()))]);
    let mut rig = Rig::new(rows);
    std::thread::sleep(Duration::from_millis(2500));
    assert!(reported(&rig).is_empty(), "there is no pod yet");
    rig.add_pod("p1");
    wait_for(&rig, CheckState::Failing, CheckFailure::Refused);
    serve(&rig);
    wait_for(&rig, CheckState::Passing, CheckFailure::Unspecified);
    // The server takes connections, and does not answer by HTTP.
    let by_http = HealthCheck {
        path: "/healthz".into(),
        ..by_tcp()
    };
    let by_http = front(Some(by_http));
    rig.operator
        .replace(&front(Some(by_tcp())), vec![], by_http.clone());
    wait_for(&rig, CheckState::Failing, CheckFailure::NoHttp);
    rig.operator.hang_up();
    let is_told = |checked: &Checked| checked.failure() == CheckFailure::NoHttp;
    rig.operator.wait_for(
        "a Hello with the state of the backend",
        |message| matches!(message, Message::Hello(hello) if hello.checks.iter().any(is_told)),
    );
    wait_for(&rig, CheckState::Failing, CheckFailure::NoHttp);
    rig.operator.replace(&by_http, vec![], front(None));
    wait_for(&rig, CheckState::Unspecified, CheckFailure::Unspecified);
}
