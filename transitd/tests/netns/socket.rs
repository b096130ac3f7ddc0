//! The CNI socket under callers that are hostile or break the protocol: transitd still answers proper callers beside
//! them.
#![allow(unsafe_code)]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fastrand::Rng;
use thuban_proto::cni::{CheckRequest, StatusRequest};
use thuban_testkit::wait::uninterrupted;

use crate::rig::{Rig, base_rows, eventually, local};

/// Number of the fuzzer's cases; `THUBAN_SOAK_SOCKET` sets another one.
const CASES: u64 = 150;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn rig() -> Rig {
    let mut rows = base_rows();
    rows.extend([local(7, "p1", 5), local(7, "p2", 6)]);
    let mut rig = Rig::new(rows);
    rig.add_pod("p1");
    rig.pod_namespace("p2");
    rig
}

fn path(rig: &Rig) -> PathBuf {
    rig.directory.join("run/cni.sock")
}

fn connect(rig: &Rig) -> UnixStream {
    let stream = UnixStream::connect(path(rig)).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
    stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
    stream
}

/// Returns open file descriptors and resident memory (KiB) of the daemon.
pub fn usage(rig: &Rig) -> (usize, usize) {
    let process = PathBuf::from(format!("/proc/{}", rig.daemon_id()));
    let status = std::fs::read_to_string(process.join("status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    let resident = line.split_whitespace().next().unwrap().parse().unwrap();
    (std::fs::read_dir(process.join("fd")).unwrap().count(), resident)
}

fn assert_checks(rig: &Rig, when: &str) {
    let unknown = CheckRequest {
        container_id: "nobody".into(),
        ifname: "eth0".into(),
        ..CheckRequest::default()
    };
    let reply = rig.call(async |mut client| client.check(unknown).await.unwrap().into_inner());
    assert_eq!(reply.error.unwrap().code, 3, "{when}");
}

/// Asserts that a CHECK and an ADD and DEL are answered as usual.
fn assert_serves(rig: &Rig) {
    assert_checks(rig, "");
    rig.plugin_add("p2");
    assert!(rig.ping("p2", "10.0.1.5"));
    assert_eq!(rig.del("p2"), None);
}

#[test]
fn only_root_is_answered_whatever_the_modes_say() {
    let rig = rig();
    let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    assert_eq!(mode(rig.directory.join("run")), 0o700);
    assert_eq!(mode(path(&rig)), 0o600);
    // The permissions are opened for everybody.
    let open = |path: PathBuf, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open(rig.directory.join("run"), 0o777);
    open(path(&rig), 0o666);
    let first = |rig: &Rig, uid: u32| {
        let path = path(rig);
        let asking = std::thread::spawn(move || {
            // SAFETY: changes the ids of this thread alone, which ends after it.
            let done = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
            assert_eq!(done, 0);
            let mut stream = UnixStream::connect(path).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let _ = stream.write_all(PREFACE);
            uninterrupted(|| stream.read(&mut [0; 9])).unwrap_or_default()
        });
        asking.join().unwrap()
    };
    assert_eq!(first(&rig, 65534), 0, "hung up on");
    assert_eq!(first(&rig, 0), 9, "root is spoken to");
    assert!(
        rig.log().contains("that is not root") && rig.log().contains("65534"),
        "{}",
        rig.log()
    );
}

#[test]
fn two_hundred_silent_or_slow_callers_delay_nobody() {
    let rig = rig();
    let (before, _) = usage(&rig);
    let mut idle: Vec<UnixStream> = (0..200).map(|_| connect(&rig)).collect();
    for (count, stream) in idle.iter_mut().enumerate() {
        // The caller sends nothing, or a part of the preface, or all of it and a frame that never ends.
        let whole = [PREFACE, &[0, 0, 200, 0, 0]].concat();
        let part = [0, 1, 12, 23, PREFACE.len(), whole.len()][count % 6];
        stream.write_all(&whole[..part]).unwrap();
    }
    let start = Instant::now();
    assert_serves(&rig);
    println!("served beside 200 idle callers in {:?}", start.elapsed());
    for stream in idle.iter_mut().step_by(6) {
        assert_eq!(
            uninterrupted(|| stream.read(&mut [0; 64])).unwrap(),
            0,
            "who says nothing is hung up on"
        );
    }
    drop(idle);
    eventually("all are closed", || usage(&rig).0 <= before);
}

#[test]
fn two_hundred_calls_at_once_are_all_answered() {
    let rig = rig();
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                rig.call(async |client| {
                    let calls = (0..10).map(|_| {
                        let mut client = client.clone();
                        async move { client.status(StatusRequest {}).await.unwrap().into_inner() }
                    });
                    for reply in futures::future::join_all(calls).await {
                        assert_eq!(reply.error, None);
                    }
                });
            });
        }
    });
    assert_serves(&rig);
}

#[test]
fn oversized_message_or_header_is_refused_and_next_served() {
    let rig = rig();
    let request = |length| CheckRequest {
        container_id: "x".repeat(length),
        ifname: "eth0".into(),
        ..CheckRequest::default()
    };
    let status = rig.call(async |mut client| client.check(request(8 << 20)).await.unwrap_err());
    assert_eq!(status.code(), tonic::Code::OutOfRange, "{status}");
    let reply = rig.call(async |mut client| client.check(request(1 << 20)).await.unwrap().into_inner());
    assert_eq!(reply.error.unwrap().code, 4, "a name that long is none");
    let status = rig.call(async |mut client| {
        let mut request = tonic::Request::new(request(3));
        let value = "y".repeat(60_000).parse().unwrap();
        request.metadata_mut().insert("x-long", value);
        client.check(request).await.unwrap_err()
    });
    println!("headers of 60,000 bytes: {:?}", status.code());
    assert_serves(&rig);
}

/// Returns the bytes that a proper client sends for a CHECK.
fn recorded(rig: &Rig) -> Vec<u8> {
    let path = rig.directory.join("recorder.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let recording = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        client.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        // SETTINGS, and the acknowledgement of the client's.
        client
            .write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 4, 1, 0, 0, 0, 0])
            .unwrap();
        let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
        while let Ok(length @ 1..) = uninterrupted(|| client.read(&mut buffer)) {
            bytes.extend_from_slice(&buffer[..length]);
        }
        bytes
    });
    let request = CheckRequest {
        container_id: "p1".into(),
        ifname: "eth0".into(),
        netns: rig.netns("p1"),
        ..CheckRequest::default()
    };
    rig.call_at(path, async |mut client| {
        let _ = client.check(request).await;
    });
    let bytes = recording.join().unwrap();
    assert!(bytes.starts_with(PREFACE) && bytes.windows(2).any(|part| part == b"p1"));
    bytes
}

fn frame(random: &mut Rng) -> Vec<u8> {
    let length = random.usize(0..64);
    let told = if random.u8(..) < 200 {
        length as u32
    } else {
        random.u32(..1 << 24)
    };
    let mut frame = told.to_be_bytes()[1..].to_vec();
    frame.extend([random.u8(..12), random.u8(..)]);
    frame.extend(random.u32(..8).to_be_bytes());
    frame.extend(std::iter::repeat_with(|| random.u8(..)).take(length));
    frame
}

fn case(random: &mut Rng, proper: &[u8]) -> Vec<u8> {
    let noise = |random: &mut Rng| {
        let length = random.usize(0..600);
        std::iter::repeat_with(|| random.u8(..))
            .take(length)
            .collect::<Vec<u8>>()
    };
    match random.u8(..5) {
        0 => noise(random),
        1 => [PREFACE, &noise(random)].concat(),
        2 => {
            let frames: Vec<u8> = (0..random.usize(1..30)).flat_map(|_| frame(random)).collect();
            [PREFACE, &[0, 0, 0, 4, 0, 0, 0, 0, 0], &frames].concat()
        }
        3 => proper[..random.usize(..proper.len())].to_vec(),
        _ => {
            let mut bytes = proper.to_vec();
            for _ in 0..random.usize(1..12) {
                let at = random.usize(PREFACE.len()..bytes.len());
                match random.u8(..3) {
                    0 => bytes[at] ^= 1 << random.u8(..8),
                    1 => bytes.insert(at, random.u8(..)),
                    _ => drop(bytes.remove(at)),
                }
            }
            bytes
        }
    }
}

#[test]
fn whatever_is_said_neither_ends_nor_stalls_it() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let cases = number("THUBAN_SOAK_SOCKET").unwrap_or(CASES);
    let seed = number("THUBAN_SEED").unwrap_or_else(|| fastrand::u64(..1 << 32));
    println!("THUBAN_SEED={seed}, {cases} cases");
    let rig = rig();
    let proper = recorded(&rig);
    let before = usage(&rig);
    for count in 0..cases {
        // A case can be repeated alone, by its number.
        let mut random = Rng::with_seed(seed.wrapping_add(count));
        let bytes = case(&mut random, &proper);
        let mut stream = connect(&rig);
        // The daemon may hang up in the middle.
        let _ = stream.write_all(&bytes);
        if random.bool() {
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.set_read_timeout(Some(Duration::from_millis(50)));
            let _ = uninterrupted(|| stream.read(&mut [0; 256]));
        }
        drop(stream);
        if count % 50 == 0 {
            assert_checks(&rig, &format!("case {count} of seed {seed}"));
        }
    }
    assert!(!rig.log().contains("panicked"), "seed {seed}: {}", rig.log());
    assert_serves(&rig);
    assert!(rig.ping_from_node("10.0.1.5"));
    eventually("all are closed", || usage(&rig).0 <= before.0);
    let after = usage(&rig);
    println!(
        "file descriptors {} -> {}, resident {} -> {} KiB",
        before.0, after.0, before.1, after.1
    );
}
