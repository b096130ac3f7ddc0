//! Generates the messages and services of `proto/*.proto` into `OUT_DIR`; nothing generated is committed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    tonic_prost_build::configure()
        // Without the clients' own `connect` helper, which clashes with the rpc of that name.
        .build_transport(false)
        .codec_path("crate::codec::SmallBuffers")
        .btree_map(".")
        .compile_protos(
            &[
                "proto/cni.proto",
                "proto/gobgp.proto",
                "proto/inspect.proto",
                "proto/observe.proto",
                "proto/transit.proto",
            ],
            &["proto"],
        )?;
    Ok(())
}
