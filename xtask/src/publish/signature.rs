//! Signatures of images, as cosign makes and checks them: a signed payload with the image's digest, as the layer of an
//! image whose tag is that digest.
//!
//! Source: cosign's specs/SIGNATURE_SPEC.md. openssl signs, because xtask, which is built first, would wait for a crate
//! that does.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use oci_spec::image::MediaType;
use serde_json::json;
use thuban_cluster::command::{bytes, bytes_with_input};

use super::layout::Layout;
use crate::images::digest;

/// The layer's annotation with the signature.
pub const ANNOTATION: &str = "dev.cosignproject.cosign/signature";
const PAYLOAD_TYPE: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// What a public key of P-256 begins with, after the header of its outer sequence: the type of key and the curve (RFC
/// 5480, section 2).
const P256: [u8; 21] = [
    0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce,
    0x3d, 0x03, 0x01, 0x07,
];

/// A private key of ECDSA with P-256, in PEM. If it has a passphrase, openssl asks for it at the terminal.
pub struct Key(PathBuf);

impl Key {
    pub fn read(path: &Path) -> Result<Self> {
        let mut public = Command::new("openssl");
        public
            .args(["pkey", "-in"])
            .arg(path)
            .args(["-pubout", "-outform", "DER"]);
        let public = bytes(&mut public)
            .with_context(|| format!("reading {}, which must be a private key in PEM", path.display()))?;
        ensure!(
            public.get(2..2 + P256.len()) == Some(P256.as_slice()),
            "{} is no key of the curve P-256: make one with `openssl genpkey -algorithm EC -pkeyopt \
             ec_paramgen_curve:P-256 -out FILE`",
            path.display()
        );
        Ok(Self(path.to_path_buf()))
    }

    /// Returns a layout with the signature of an image. `repository`: the image's name without tag and digest.
    pub fn sign(&self, repository: &str, signed: &str, folder: PathBuf) -> Result<Layout> {
        let payload = payload(repository, signed)?;
        let mut sign = Command::new("openssl");
        sign.args(["dgst", "-sha256", "-sign"]).arg(&self.0);
        let signature = bytes_with_input(&mut sign, &payload)
            .with_context(|| format!("signing {signed} with {}", self.0.display()))?;
        let config = serde_json::to_vec(&json!({
            "architecture": "", "os": "", "config": {},
            "rootfs": {"type": "layers", "diff_ids": [digest(&payload)]},
        }))?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": MediaType::ImageManifest.to_string(),
            "config": {
                "mediaType": MediaType::ImageConfig.to_string(), "digest": digest(&config), "size": config.len(),
            },
            "layers": [{
                "mediaType": PAYLOAD_TYPE, "digest": digest(&payload), "size": payload.len(),
                "annotations": {ANNOTATION: BASE64_STANDARD.encode(signature)},
            }],
        }))?;
        let layout = Layout::empty(folder)?;
        layout.blob(&payload)?;
        layout.blob(&config)?;
        layout.set_root(MediaType::ImageManifest, &manifest)?;
        Ok(layout)
    }
}

/// Returns the tag of an image's signature.
pub fn tag(signed: &str) -> String {
    format!("{}.sig", signed.replace(':', "-"))
}

fn payload(repository: &str, signed: &str) -> Result<Vec<u8>> {
    let claim = json!({
        "critical": {
            "identity": {"docker-reference": repository},
            "image": {"docker-manifest-digest": signed},
            "type": "cosign container image signature",
        },
        "optional": null,
    });
    Ok(serde_json::to_vec(&claim)?)
}

/// Makes keys and checks signatures, for tests.
pub mod testing {
    use std::fs;

    use super::{BASE64_STANDARD, Command, Context, Engine, Path, Result, bytes, bytes_with_input};

    /// Makes a private key of a curve.
    pub fn make_key(path: &Path, curve: &str) -> Result<()> {
        let mut make = Command::new("openssl");
        make.args(["genpkey", "-algorithm", "EC", "-pkeyopt"])
            .arg(format!("ec_paramgen_curve:{curve}"))
            .arg("-out")
            .arg(path);
        bytes(&mut make).map(drop)
    }

    /// Fails if the signature, in base64, is not that of the payload by this key. `folder`: for files on the way.
    pub fn verify(key: &Path, payload: &[u8], signature: &str, folder: &Path) -> Result<()> {
        let public = folder.join("public.pem");
        let mut export = Command::new("openssl");
        export
            .args(["pkey", "-in"])
            .arg(key)
            .args(["-pubout", "-out"])
            .arg(&public);
        bytes(&mut export)?;
        let raw = folder.join("signature");
        fs::write(&raw, BASE64_STANDARD.decode(signature)?).context("writing the signature")?;
        let mut verify = Command::new("openssl");
        verify
            .args(["dgst", "-sha256", "-verify"])
            .arg(&public)
            .arg("-signature")
            .arg(&raw);
        bytes_with_input(&mut verify, payload).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::Value;

    use super::{
        super::layout::testing::{blob, document, index},
        testing::{make_key, verify},
        *,
    };

    const SIGNED: &str = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("thuban-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn the_signature_is_of_the_digest_and_by_the_key() {
        let folder = folder("signature");
        let path = folder.join("key.pem");
        make_key(&path, "P-256").unwrap();
        let key = Key::read(&path).unwrap();
        let layout = key.sign("example.test/a", SIGNED, folder.join("layout")).unwrap();
        let manifest = document(&layout, &index(&layout)["manifests"][0]["digest"]);
        let layer = &manifest["layers"][0];
        assert_eq!(layer["mediaType"], PAYLOAD_TYPE);
        let payload = blob(&layout, &layer["digest"]);
        let claim: Value = serde_json::from_slice(&payload).unwrap();
        assert_eq!(claim["critical"]["image"]["docker-manifest-digest"], SIGNED);
        assert_eq!(
            claim["critical"]["identity"]["docker-reference"],
            "example.test/a"
        );
        assert_eq!(claim["critical"]["type"], "cosign container image signature");

        let signature = layer["annotations"][ANNOTATION].as_str().unwrap();
        verify(&path, &payload, signature, &folder).unwrap();
        let other = super::payload("example.test/a", &SIGNED.replace('0', "1")).unwrap();
        assert!(verify(&path, &other, signature, &folder).is_err());
        let stranger = folder.join("stranger.pem");
        make_key(&stranger, "P-256").unwrap();
        assert!(verify(&stranger, &payload, signature, &folder).is_err());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn keys_that_cosign_would_not_take_are_refused() {
        let folder = folder("keys");
        let path = folder.join("key.pem");
        make_key(&path, "P-384").unwrap();
        let error = format!("{:#}", Key::read(&path).err().unwrap());
        assert!(error.contains("no key of the curve P-256"), "{error}");
        fs::write(&path, "no key").unwrap();
        let error = format!("{:#}", Key::read(&path).err().unwrap());
        assert!(error.contains("must be a private key in PEM"), "{error}");
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_tag_is_the_digest() {
        assert_eq!(tag("sha256:ab12"), "sha256-ab12.sig");
    }
}
