//! Certificates and kubeconfigs of an instance, made with openssl. They live as long as the instance. rcgen is no
//! choice: with ring it makes no RSA key (service accounts' tokens), and xtask, built first, would wait for both.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use anyhow::{Context, Result};

use crate::{
    command::run,
    instance::{Instance, NODES},
};

/// First address of the service range. Pods may know the API server by it.
const SERVICE_ADDRESS: &str = "10.96.0.1";
const CURVE: [&str; 4] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"];

/// Makes the CA, the key for service account tokens, all certificates and kubeconfigs.
pub fn create(instance: &Instance) -> Result<()> {
    let folder = instance.pki();
    fs::create_dir_all(&folder)?;
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))?;
    let file = |name: &str| folder.join(name).display().to_string();
    let mut authority = vec![
        "req",
        "-x509",
        "-nodes",
        "-days",
        "3650",
        "-subj",
        "/CN=thuban-cluster",
    ];
    authority.extend(CURVE);
    let (key, certificate) = (file("ca.key"), file("ca.crt"));
    authority.extend(["-keyout", &key, "-out", &certificate]);
    run("openssl", &authority)?;
    run(
        "openssl",
        &["genrsa", "-out", &file("service-accounts.key"), "2048"],
    )?;
    fs::write(
        folder.join("names.conf"),
        format!(
            "subjectAltName=IP:{},IP:127.0.0.1,IP:{SERVICE_ADDRESS},DNS:kubernetes,DNS:kubernetes.default.svc\n",
            instance.gateway()
        ),
    )?;
    for (name, subject) in [
        ("apiserver", "/CN=kube-apiserver"),
        ("admin", "/O=system:masters/CN=admin"),
        ("controller-manager", "/CN=system:kube-controller-manager"),
        ("scheduler", "/CN=system:kube-scheduler"),
    ] {
        sign(&folder, name, subject)?;
    }
    for node in NODES {
        sign(&folder, node, &format!("/O=system:nodes/CN=system:node:{node}"))?;
    }
    for name in ["admin", "controller-manager", "scheduler"].iter().chain(&NODES) {
        write_kubeconfig(instance, name)?;
    }
    Ok(())
}

fn sign(folder: &Path, name: &str, subject: &str) -> Result<()> {
    let file = |name: &str, end: &str| folder.join(format!("{name}.{end}")).display().to_string();
    let (key, request, certificate) = (file(name, "key"), file(name, "csr"), file(name, "crt"));
    let mut arguments = vec!["req", "-nodes", "-subj", subject];
    arguments.extend(CURVE);
    arguments.extend(["-keyout", &key, "-out", &request]);
    run("openssl", &arguments)?;
    let (authority, authority_key, names) = (file("ca", "crt"), file("ca", "key"), file("names", "conf"));
    let mut arguments = vec![
        "x509",
        "-req",
        "-days",
        "3650",
        "-CAcreateserial",
        "-in",
        &request,
        "-out",
        &certificate,
    ];
    arguments.extend(["-CA", &authority, "-CAkey", &authority_key, "-extfile", &names]);
    run("openssl", &arguments)?;
    Ok(())
}

fn write_kubeconfig(instance: &Instance, user: &str) -> Result<()> {
    let pki = instance.pki();
    let file = |name: String| pki.join(name).display().to_string();
    let cluster = format!("thuban-{}", instance.name());
    let config = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": cluster,
        "clusters": [{"name": cluster, "cluster": {
            "server": instance.api_url(), "certificate-authority": file("ca.crt".into())}}],
        "users": [{"name": user, "user": {
            "client-certificate": file(format!("{user}.crt")), "client-key": file(format!("{user}.key"))}}],
        "contexts": [{"name": cluster, "context": {"cluster": cluster, "user": user}}],
    });
    let path = instance.state().join(format!("{user}.conf"));
    fs::write(&path, format!("{config:#}\n")).with_context(|| format!("writing {}", path.display()))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(())
}
