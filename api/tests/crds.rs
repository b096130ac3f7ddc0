//! The CRDs in `install/` are generated from the types of this crate, and committed.

#![allow(clippy::unwrap_used)] // a test

#[test]
fn the_committed_crds_are_current() {
    for (file, text) in thuban_api::manifests().unwrap() {
        let path = format!("{}/../install/{file}", env!("CARGO_MANIFEST_DIR"));
        let committed = std::fs::read_to_string(&path).unwrap();
        assert!(
            committed == text,
            "{path} is not what api/ says: run `cargo xtask crds` and commit it"
        );
    }
}
