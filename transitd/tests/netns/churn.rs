//! Pods that come and go on addresses that are used again at once, by another VPC too, while neighbours of both VPCs
//! send to all of them: no datagram goes astray, and nothing grows.
//!
//! 60 cycles, or as many as `THUBAN_CHURN` says.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thuban_proto::transit::{AddressKey, RowKey, row_key::Key};
use thuban_testkit::wait::uninterrupted;

use crate::rig::{Rig, base_rows, in_namespace, local, mapped};

const PORT: u16 = 9;
/// Last bytes of addresses that come and go.
const SHARED: [u8; 4] = [10, 11, 12, 13];
const VPCS: [u32; 2] = [7, 8];
/// How long a pod's first datagram may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Sends from a neighbour to all shared addresses until it is stopped; a datagram says the VPC and the address that it
/// is for.
struct Neighbour {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

impl Neighbour {
    fn new(namespace: String, vni: u32) -> Self {
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&sent));
        let thread = thread::spawn(move || {
            let socket = in_namespace(&namespace, || {
                UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap()
            });
            while !stopped.load(Ordering::Relaxed) {
                for last in SHARED {
                    // Errors are ICMP answers that nobody is there.
                    let _ = socket.send_to(&[vni as u8, last], (Ipv4Addr::new(10, 0, 1, last), PORT));
                    count.fetch_add(1, Ordering::Relaxed);
                }
                thread::sleep(Duration::from_millis(2));
            }
        });
        Self { stop, sent, thread }
    }

    fn stop(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        self.sent.load(Ordering::Relaxed)
    }
}

/// The resources that the daemon holds.
#[derive(Clone, Copy, Debug)]
struct Holdings {
    memory_kib: u64,
    files: usize,
    rows: usize,
}

fn holdings(rig: &Rig) -> Holdings {
    let process = format!("/proc/{}", rig.daemon_id());
    let status = std::fs::read_to_string(format!("{process}/status")).unwrap();
    let memory = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    let tables = ["ATTACHMENTS", "LOCAL_ENDPOINTS"];
    Holdings {
        memory_kib: memory.split_whitespace().nth(1).unwrap().parse().unwrap(),
        files: std::fs::read_dir(format!("{process}/fd")).unwrap().count(),
        rows: tables.iter().map(|table| rig.rows(table).len()).sum(),
    }
}

/// Takes at most `most` of the datagrams that have come; an error names one that was not for this pod.
fn receive(socket: &UdpSocket, vni: u32, last: u8, most: usize) -> Result<usize, String> {
    let mut word = [0; 16];
    let mut count = 0;
    while count < most {
        let Ok((length, from)) = uninterrupted(|| socket.recv_from(&mut word)) else {
            break;
        };
        if word[..length] != [vni as u8, last] {
            return Err(format!(
                "{:?} from {from} came to 10.0.1.{last} of VPC {vni}",
                &word[..length]
            ));
        }
        count += 1;
    }
    Ok(count)
}

/// Runs one pod's life. The pod gets the datagrams of its VPC's neighbour, and none of the other VPC's.
fn live(rig: &Rig, pod: &str, vni: u32, last: u8) {
    let (exit, result) = rig.plugin("ADD", pod, "1.1.0", json!({}));
    assert_eq!(exit, 0, "{result}\n{}", rig.log());
    let socket = in_namespace(&format!("{}-{pod}", rig.name), || {
        UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap()
    });
    socket.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    let start = Instant::now();
    let mut received = 0;
    while received < 2 {
        received += receive(&socket, vni, last, 2).unwrap();
        assert!(
            start.elapsed() < ANSWER_TIMEOUT,
            "nothing came to {pod}\n{}",
            rig.log()
        );
    }
    assert_eq!(rig.plugin("DEL", pod, "1.1.0", json!({})), (0, Value::Null));
    // No more datagrams come: the interface is gone.
    receive(&socket, vni, last, usize::MAX).unwrap();
}

fn pod(vni: u32, last: u8) -> String {
    format!("v{vni}s{last}")
}

/// Moves the address from one VPC's pod to the other VPC's pod. The ADD of the other pod waits for the address.
fn hand_over(rig: &Rig, from: u32, to: u32, last: u8) {
    let key = Key::Local(AddressKey {
        vni: from,
        address: mapped(last),
    });
    let old = local(from, &pod(from, last), last);
    let new = local(to, &pod(to, last), last);
    rig.operator.replace(&old, vec![RowKey { key: Some(key) }], new);
}

#[test]
fn addresses_are_reused_at_once_without_strays_or_growth() {
    let given = std::env::var("THUBAN_CHURN").ok();
    let cycles: usize = given.map_or(60, |text| text.parse().unwrap());
    let mut rows = base_rows();
    rows.extend([local(7, "n7", 5), local(8, "n8", 6)]);
    let mut rig = Rig::new(rows);
    for pod in ["n7", "n8"] {
        rig.pod_namespace(pod);
        rig.plugin_add(pod);
    }
    // Namespaces are used again and again: a pod leaves its namespace as it found it.
    for (vni, last) in VPCS.into_iter().flat_map(|vni| SHARED.map(|last| (vni, last))) {
        rig.pod_namespace(&pod(vni, last));
    }
    let neighbours = VPCS.map(|vni| Neighbour::new(format!("{}-n{vni}", rig.name), vni));
    let mut early = None;
    let tenth = (cycles / 10).max(1);
    for cycle in 0..cycles {
        let last = SHARED[cycle % SHARED.len()];
        let round = cycle / SHARED.len();
        let [from, to] = [VPCS[(round + 1) % 2], VPCS[round % 2]];
        hand_over(&rig, from, to, last);
        live(&rig, &pod(to, last), to, last);
        if cycle % 100 == 99 {
            rig.operator.forget_received();
        }
        if cycle + 1 == tenth {
            early = Some(holdings(&rig));
        }
    }
    let (early, mut late) = (early.unwrap(), holdings(&rig));
    // The connection of the last verb may still be open.
    let end = Instant::now() + ANSWER_TIMEOUT;
    while late.files > early.files && Instant::now() < end {
        late = holdings(&rig);
    }
    let sent = neighbours.map(Neighbour::stop);
    println!("{cycles} cycles, {sent:?} datagrams; after a tenth {early:?}, at the end {late:?}");
    assert!(late.files <= early.files, "{early:?} {late:?}");
    assert_eq!((early.rows, late.rows), (4, 4), "two rows of each neighbour");
    assert!(late.memory_kib < early.memory_kib + 4096, "{early:?} {late:?}");
    for pod in ["n7", "n8"] {
        assert_eq!(rig.plugin("DEL", pod, "1.1.0", json!({})), (0, Value::Null));
    }
    assert_eq!(rig.traces(), Vec::<String>::new());
}
