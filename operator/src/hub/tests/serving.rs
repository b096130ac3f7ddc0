//! What a new leader sends, and when: nothing before all objects are listed, then programs in parts.

use super::*;

fn droplet(number: u8) -> String {
    format!("d{number:03}")
}

/// Returns the programs of a stream, the first of which is the snapshot, and how many rows they set.
fn taken(stream: &mut UnboundedReceiver<Outgoing>) -> (usize, usize) {
    let programs = received(stream);
    let is_snapshot: Vec<bool> = programs.iter().map(|program| program.snapshot).collect();
    assert!(
        programs.is_empty() || is_snapshot[0] && !is_snapshot[1..].contains(&true),
        "{is_snapshot:?}"
    );
    let rows = programs.iter().map(|program| program.upserts.len()).sum();
    (programs.len(), rows)
}

#[tokio::test(start_paused = true)]
async fn programs_go_in_parts_between_which_others_have_the_lock() {
    let (hub, _woken) = hub();
    hub.hold_back(Duration::ZERO);
    hub.update(|world| {
        for number in 0..100 {
            world.set_droplet(&droplet(number), Some(Ipv4Addr::new(172, 17, 0, number)));
        }
    });
    let open = |name: &str| hub.open(name, &[], &[], Kinds::all()).1;
    let mut streams: Vec<_> = (0..100).map(|number| open(&droplet(number))).collect();
    assert!(hub.serve_some());
    // Who has a program dials again, as does who has none yet. A droplet comes.
    let (mut again, mut first) = (open(&droplet(0)), open(&droplet(99)));
    hub.update(|world| world.set_droplet("new", Some(Ipv4Addr::new(172, 18, 0, 1))));
    serve(&hub);
    // Three droplets are of the hub.
    let all = 3 + 100 + 1 - 1;
    assert_eq!(taken(&mut streams[0]), (1, all - 1), "its stream had ended");
    assert_eq!(taken(&mut streams[99]), (0, 0), "its stream had ended");
    for (number, stream) in streams.iter_mut().enumerate().take(99).skip(1) {
        let programs = if number < 32 { 2 } else { 1 };
        assert_eq!(taken(stream), (programs, all), "{number}");
    }
    assert_eq!((taken(&mut again), taken(&mut first)), ((2, all), (2, all)));
    assert!(!hub.serve_some(), "nothing is held back any more");
    assert_eq!(taken(&mut open(&droplet(5))), (1, all));
}

#[test]
fn rows_are_made_once_all_objects_are_listed() {
    let (hub, _woken) = hub();
    hub.begin_filling();
    hub.update(|world| world.set_endpoint(&name(), Some(endpoint())));
    let has_row = || hub.read(|world| world.program("c").contains_key(&Key::Local(VNI, V4)));
    assert!(hub.is_filling() && !has_row());
    hub.end_filling();
    assert!(!hub.is_filling() && has_row());
}
