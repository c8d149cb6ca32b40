"""What an attacker brings: other people's names, jobs with code or classes of their own, connections without certificates."""

import contextlib
import json
import shutil
import socket
import ssl
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from fedbilevel.federation.nvflare.job import EXECUTOR, write_job
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.tables.schema import Column, Schema
from tests.federation import programs
from tests.federation.federation import LONG, SITES


def allow_everything(local):
    resources = json.loads((local / "resources.json").read_text())
    resources["class_allow_list"] = ["*"]
    (local / "resources.json").write_text(json.dumps(resources))
    rules = json.loads((local / "authorization.json").read_text())
    rules["permissions"] |= dict.fromkeys(("project_admin", "lead"), "any")
    (local / "authorization.json").write_text(json.dumps(rules))


def disguised(federation, user):
    """A coordinator's kit with a site's certificate in it."""
    kit = shutil.copytree(federation.kits.admin, federation.folder / f"disguised-{user}")
    for name in ("client.crt", "client.key"):
        shutil.copy(federation.kits.sites["site-1"] / "startup" / name, kit / "startup" / name)
    about = json.loads((kit / "startup/fed_admin.json").read_text())
    about["admin"]["username"] = user
    (kit / "startup/fed_admin.json").write_text(json.dumps(about))
    return kit


def honest_job(home, run, **more):
    arguments = {"algorithm": "fedbio", "rounds": 1, "options": {"batch_size": 4, "local_steps": 1}}
    settings = JobSettings(run, programs.FUNCTION, SITES[:2], arguments, double=True, **more)
    return write_job(home / "tried", settings)


def job_with_code(home):
    """The same job with a module of its own, which leaves a mark wherever it is imported."""
    job = honest_job(home, "with-code")
    custom = job / "app/custom"
    custom.mkdir()
    custom.joinpath("brought.py").write_text(
        "import os, pathlib\n"
        f"pathlib.Path({str(home)!r}, f'mark-{{os.getpid()}}').touch()\n"
        "from fedbilevel.federation.nvflare.executor import SiteExecutor\n"
        "class Brought(SiteExecutor):\n    pass\n"
    )
    change_executor(job, "brought.Brought")
    return job


def job_with_class(home):
    """The same job with an executor of NVFlare's own, which writes and sends whatever its arguments say."""
    job = honest_job(home, "with-class")
    change_executor(job, "nvflare.app_common.np.np_trainer.NPTrainer", {})
    return job


def job_that_expands(home):
    """Settings that NVFlare would replace by a variable of the site's environment."""
    job = honest_job(home, "expands")
    change_executor(job, EXECUTOR, {"settings": "{$HOME}"})
    return job


def job_that_includes(home, what):
    """A job in HOCON that includes ``what``, a ``file("...")`` of the site or a ``url("...")`` called from there."""
    job = honest_job(home, f"includes-{what[:3]}")
    file = job / "app/config/config_fed_client.json"
    file.with_suffix(".conf").write_text(file.read_text().rstrip()[:-1] + f",\n  stolen = {{ include {what} }}\n}}\n")
    file.unlink()
    return job


def job_with_log_classes(home):
    """The same job with a configuration of the log, which names classes to be made."""
    job = honest_job(home, "log-classes")
    (job / "app/config/log_config.json").write_text(
        json.dumps({"version": 1, "handlers": {"x": {"class": "x.Handler"}}})
    )
    return job


def change_executor(job, path, arguments=None):
    file = job / "app/config/config_fed_client.json"
    config = json.loads(file.read_text())
    executor = config["executors"][0]["executor"]
    executor["path"] = path
    if arguments is not None:
        executor["args"] = arguments
    file.write_text(json.dumps(config))


def job_for_column(home):
    """A fit on one column more than site-3 lists."""
    return job_on_table(home, "curious", (Column("age"), Column("secret"), Column("sex", kind="ignore")))


def job_for_few_patients(home):
    """A fit on rows that the schema picks out of those of site-3, by calling all others missing."""
    columns = (Column("age"), Column("sex", kind="ignore"))
    return job_on_table(home, "patients", columns, missing=("", "m", "no"))


def job_on_table(home, run, columns, **further):
    schema = Schema("outcome", ("no", "yes"), "yes", ("sex",), ("f", "m"), columns, **further)
    settings = JobSettings(run, "fair", ("site-3",), {"schema": schema.text(), "recipe": {"method": "fedavg"}})
    return write_job(home / "tried", settings)


def let_in(port, context, seconds=LONG):
    """Whether the server keeps a connection for that many seconds, in which a refusal has come however slow the machine is;
    without TLS (None) it is sent something that is no handshake."""
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LONG))
        try:
            if context is None:
                channel.sendall(b"hello\n" * 20)
            else:
                channel = stack.enter_context(context.wrap_socket(channel, server_hostname="localhost"))
            channel.settimeout(seconds)
            return bool(channel.recv(1))
        except TimeoutError:
            return True  # it holds the line
        except (ssl.SSLError, ConnectionError):
            return False


def lasting(federation, site, days):
    """A kit of the site with its own key, and a certificate of the federation's authority that lasts so many days more."""
    kit = shutil.copytree(
        federation.kits.sites[site] / "startup", federation.folder / f"{days}-days" / "startup"
    ).parent
    (state,) = (federation.folder / "kits/authority").rglob("cert.json")
    signer = serialization.load_pem_private_key(json.loads(state.read_text())["root_pri_key"].encode(), None)
    made = x509.load_pem_x509_certificate((kit / "startup/client.crt").read_bytes())
    builder = x509.CertificateBuilder(made.issuer, made.subject, made.public_key(), x509.random_serial_number())
    now = datetime.now(UTC)
    builder = builder.not_valid_before(now - timedelta(days=360)).not_valid_after(now + timedelta(days=days))
    for extension in made.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    signed = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (kit / "startup/client.crt").write_bytes(signed)
    return kit


def context_of(kit):
    """TLS that trusts the federation's server, with the certificate of a kit (None: without one)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if kit is not None:
        context.load_cert_chain(kit / "startup/client.crt", kit / "startup/client.key")
    return context
