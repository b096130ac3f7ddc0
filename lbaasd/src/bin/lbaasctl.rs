//! lbaasctl: makes and shows Vips by the user's own rights at the API server.

use std::process::ExitCode;

use lbaasd::ctl;

#[tokio::main]
async fn main() -> ExitCode {
    // An error means that there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let arguments = ctl::arguments::parse(std::env::args_os());
    match ctl::run(arguments).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
