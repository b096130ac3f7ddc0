//! `install/10-crds.yaml` is generated from the types of this crate, and committed.

#![allow(clippy::unwrap_used)] // a test

#[test]
fn the_committed_crds_are_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../install/10-crds.yaml");
    let committed = std::fs::read_to_string(path).unwrap();
    assert!(
        committed == thuban_api::manifest().unwrap(),
        "{path} is not what api/ says: run `cargo xtask crds` and commit it"
    );
}
